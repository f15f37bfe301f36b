"""Diffusion models: checkpoints, loading, encode, denoising steps and decode on one device."""
