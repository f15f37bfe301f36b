"""Engine that runs diffusers' video pipelines in parts, such as a range of denoising steps."""
