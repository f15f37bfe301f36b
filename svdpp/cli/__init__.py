"""The commands: thin, one file each; one printer, one table of errors."""
