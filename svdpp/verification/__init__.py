"""The proof: reference run, comparison, result and report."""
