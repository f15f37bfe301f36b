"""Code of the ranks' parent process: `Pipeline`, supervisor, jobs, and the manifest of a run."""
