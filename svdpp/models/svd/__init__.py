"""Stable Video Diffusion: encode, denoise, decode, weights and memory."""
