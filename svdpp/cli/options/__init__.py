"""Options of the command line. Each option is declared once, in one group of options."""
