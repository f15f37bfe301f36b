"""Owns the memory table of `svdpp plan --memory`. Imports torch only when it is asked for."""

from __future__ import annotations

from typing import Any

from svdpp.cli.console import Console
from svdpp.config import PipelineConfig
from svdpp.plan.schedule import Schedule

_GIB = 2**30


def memory_rows(config: PipelineConfig, schedule: Schedule) -> list[dict[str, Any]]:
    """What each rank will take, in GiB, as plain values for `--json` and for `print_memory`.

    Args:
        config: of the run that is planned.
        schedule: the plan itself, whatever its split and layout.

    Raises:
        ModelError: the model cannot be found, or is not whole.
    """
    from svdpp.runtime.pipeline import quiet_libraries

    quiet_libraries()  # they speak while they are imported
    from svdpp.runtime.rank_memory import estimate_ranks

    return [
        {
            "rank": one.rank,
            "parts": list(one.parts),
            "weights_gib": one.weight_bytes / _GIB,
            "activations_gib": one.activation_bytes / _GIB,
            "process_gib": one.process_bytes / _GIB,
            "total_gib": one.total_bytes / _GIB,
        }
        for one in estimate_ranks(config, schedule)
    ]


def print_memory(console: Console, rows: list[dict[str, Any]]) -> None:
    """The rows as a table, and what it leaves out."""
    numbers = ("weights_gib", "activations_gib", "process_gib", "total_gib")
    columns = ("rank", "parts", "weights GiB", "activations GiB", "process GiB", "peak GiB")
    console.table(
        columns,
        [
            (str(row["rank"]), "+".join(row["parts"]) or "-", *(f"{row[n]:.2f}" for n in numbers))
            for row in rows
        ],
    )
    if any(row["process_gib"] for row in rows):
        console.talk("CPU ranks: what malloc keeps of freed memory comes on top")
    else:
        console.talk("CUDA's context and cuDNN's workspaces, some 0.5 to 1 GiB, come on top")
