"""One engine for the video pipelines of diffusers; each family of models is a `FamilySpec`."""
