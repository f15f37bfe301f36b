"""Transfer of packets between ranks: header, transport, CUDA streams."""
