"""The parent process: pipeline, supervisor, trace, jobs and the run manifest."""
