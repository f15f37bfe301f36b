"""Code of the parent process: `Pipeline`, supervisor of ranks, jobs, and the manifest of a run."""
