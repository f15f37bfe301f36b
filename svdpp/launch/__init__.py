"""Processes of ranks: start, rendezvous, connection to the parent, and end."""
