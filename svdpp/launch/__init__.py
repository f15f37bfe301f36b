"""Processes of the ranks: start, rendezvous, connection to the parent process, and end."""
