"""HTTP service: a durable queue of jobs and a web page, for one pipeline."""
