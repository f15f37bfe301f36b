"""Command-line interface: one file for each command; all output goes through `Console`."""
