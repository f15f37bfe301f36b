"""How packets move between ranks: header, transport, CUDA streams."""
