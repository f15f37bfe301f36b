"""The names of a bench's cases, figures and files. Imports nothing."""

from __future__ import annotations

#: The case that is measured, and its two baselines.
PIPELINE, DATA_PARALLEL, ONE_DEVICE = "pipeline", "data parallel", "diffusers"
CASES = (PIPELINE, DATA_PARALLEL, ONE_DEVICE)

SUMMARY = "summary.json"
CONFIG = "config.yaml"
ENVIRONMENT = "env.json"
ROUNDS = "rounds.jsonl"
TABLE = "summary.csv"
PROFILE = "profile.json"
COSTS = "costs.json"

#: The parts of the ranks' time; `summary.json` has the share of each.
TIME_PARTS = ("compute", "wait", "transfer", "idle", "unaccounted")

#: The figures of a case in `summary.json`, `over_rounds`.
FIGURES = (
    "clips",
    "makespan_seconds",
    "overhead",
    "first_clip_seconds",
    "steady_clips_per_minute",
    "step_p50_seconds",
    "step_p90_seconds",
    "step_p95_seconds",
    "bubble",
    *(f"{part}_share" for part in TIME_PARTS),
    "tflops",
    "mfu",
    "start_seconds",
    "load_seconds",
    "peak_allocated_gib",
    "peak_reserved_gib",
)


def is_share(figure: str) -> bool:
    """Whether `figure` is a share of a whole; shares can be 0, and their mean is arithmetic."""
    return figure.endswith("_share") or figure == "bubble"
