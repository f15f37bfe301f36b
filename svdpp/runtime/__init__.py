"""Where models meet ranks: the engine, the reference, and the proof that they agree."""
