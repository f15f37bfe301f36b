"""The parent process: pipeline, supervision, trace, jobs and the run manifest."""
