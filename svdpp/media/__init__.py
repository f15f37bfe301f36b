"""Images, videos, prompts and output files. Imports neither torch nor anything about ranks."""
