"""Verification: reference run, comparison, result and report."""
