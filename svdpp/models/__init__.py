"""Diffusion models: load, encode, denoise, decode. Knows no ranks."""
