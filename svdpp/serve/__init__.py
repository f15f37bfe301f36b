"""The HTTP service: a durable queue and a page over one pipeline."""
