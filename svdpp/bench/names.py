"""Owns the names by which a bench is read again: its cases and its files. Imports nothing.

So that holding two benches against each other needs no torch.
"""

from __future__ import annotations

#: What is measured, and the two things beside which it is.
PIPELINE, DATA_PARALLEL, ONE_DEVICE = "pipeline", "data parallel", "diffusers"

SUMMARY, CONFIG, ENVIRONMENT, SPANS, TABLE, PROFILE, COSTS = (
    *("summary.json", "config.yaml", "env.json", "spans.jsonl", "summary.csv"),
    *("profile.json", "costs.json"),
)
