"""Transfer of packets between ranks: packet format, transport, and CUDA streams."""
