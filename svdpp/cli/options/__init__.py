"""The options of the command line: each is declared once, in the group that it belongs to."""
