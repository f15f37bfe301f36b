"""Diagnostics: `svdpp doctor`, `env` and `profile`, reports on runs, and trace files."""
