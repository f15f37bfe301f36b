"""Diffusion: loading, encoding, denoising, decoding. Knows no ranks."""
