"""Code of the parent process: pipeline, supervisor, trace, jobs and the run's manifest."""
