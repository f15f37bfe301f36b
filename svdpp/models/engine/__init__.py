"""One engine for the video pipelines of diffusers; a family of models is a row of its table."""
