"""Transfer of packets between ranks: packet, transport, CUDA streams."""
