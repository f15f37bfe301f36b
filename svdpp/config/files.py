"""Reading the files that users name: small untrusted texts, and costs."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from svdpp.errors import InputError, RequestError
from svdpp.plan.costs import PRESETS, Costs

#: The default limit of a small file.
MAX_BYTES = 1_000_000
# A run's manifest, which holds the run's costs, grows with its clips.
_MAX_COSTS_BYTES = 2**26


def read_small_file(path: Path, what: str, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file of at most `max_bytes`; messages name the kind by `what`.

    A pipe or device is refused, because a read of it could block.
    """
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError(f"{what} {str(path)!r} is not a regular file")
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{what} {str(path)!r} cannot be read: {reason}") from error
    if len(data) > max_bytes:
        raise InputError(f"{what} {str(path)!r} is larger than {max_bytes} bytes")
    return data


def find_costs(name_or_path: str) -> Costs:
    """The preset of that name, else the costs file at that path."""
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    if not Path(name_or_path).exists():
        raise RequestError(
            f"--costs {name_or_path!r} is neither a file nor a preset",
            f"presets: {', '.join(PRESETS)}",
        )
    return read_costs(name_or_path)


def read_costs(path: str | Path) -> Costs:
    """The costs in a costs file, or those that a run measured, in its `run.json`."""
    try:
        content = json.loads(read_small_file(Path(path), "costs file", _MAX_COSTS_BYTES))
    except (ValueError, RecursionError) as error:
        raise InputError(f"costs file {str(path)!r} is not JSON: {error}") from error
    if isinstance(content, Mapping) and "clips" in content:
        measured = content.get("measured")
        content = measured.get("costs") if isinstance(measured, Mapping) else None
        if content is None:
            raise RequestError(f"{path}: the run has measured no costs")
    return Costs.from_json(content, str(path))
