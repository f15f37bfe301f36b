"""Benchmarks: configuration, runs, results and comparison."""
