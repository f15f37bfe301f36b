"""svdpp: Stable Video Diffusion over several devices by splitting the denoising steps."""

__version__ = "0.3.0"
