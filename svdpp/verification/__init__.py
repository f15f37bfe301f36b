"""Verification: reference run, comparison and result, for new runs and finished clips."""
