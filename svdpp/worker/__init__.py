"""Ranks: main loop, execution of actions, and background threads."""
