"""Engine that runs diffusers' video pipelines in parts; a `FamilySpec` describes each family."""
