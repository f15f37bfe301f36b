"""Code of the rank processes: main loop, execution of actions, and background threads."""
