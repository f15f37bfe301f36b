"""Stable Video Diffusion: load, encode, denoise, decode, estimate memory."""
