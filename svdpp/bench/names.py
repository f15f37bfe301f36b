"""Owns the names of a bench's cases and files. Imports nothing: `bench.compare` needs no torch."""

from __future__ import annotations

#: The case that is measured, and its two baselines.
PIPELINE, DATA_PARALLEL, ONE_DEVICE = "pipeline", "data parallel", "diffusers"

SUMMARY = "summary.json"
CONFIG = "config.yaml"
ENVIRONMENT = "env.json"
SPANS = "spans.jsonl"
TABLE = "summary.csv"
PROFILE = "profile.json"
COSTS = "costs.json"
