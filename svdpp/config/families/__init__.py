"""Families of models: one module each, with the family's sampling parameters and its spec."""
