"""Readers of cost models, which say how many seconds each kind of work of a run takes.

A cost model comes from a preset, a costs file, or the `run.json` of an earlier run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from svdpp.config.limits import read_small_file, require
from svdpp.errors import InputError
from svdpp.plan.costs import PRESETS, CostModel

# Largest size of a costs file in bytes. The limit is high, because users may give a `run.json` in
# place of a costs file, and a `run.json` grows with the number of clips.
_COSTS_BYTES = 2**26


def find_costs(name_or_path: str) -> CostModel:
    """Return the cost model of a preset, or of a costs file if no preset has the name.

    Args:
        name_or_path: One of `PRESETS`, or the path of a costs file.

    Raises:
        RequestError: No preset and no file has the name, or the file is the `run.json` of a run
            that measured no costs.
        InputError: The file cannot be read, or holds no costs.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    require(
        Path(name_or_path).exists(),
        f"`costs` {name_or_path!r} is neither a file nor a preset",
        f"the presets are {', '.join(PRESETS)}",
    )
    return read_costs(name_or_path)


def read_costs(path: str | Path) -> CostModel:
    """Read the cost model in a costs file, or the measured costs in the `run.json` of a run.

    Raises:
        RequestError: The file is the `run.json` of a run that measured no costs.
        InputError: The file cannot be read, is not JSON, or holds no costs.
    """
    try:
        content = json.loads(read_small_file(Path(path), "costs file", _COSTS_BYTES))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"costs file {str(path)!r} is not JSON: {error}",
            details={"path": str(path), "reason": str(error)},
        ) from error
    if isinstance(content, Mapping) and "clips" in content:
        measured = content.get("measured")
        content = measured.get("costs") if isinstance(measured, Mapping) else None
        require(content is not None, f"{path}: the run has measured no costs")
    return CostModel.from_json(content, str(path))
