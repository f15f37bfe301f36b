"""The clips of a run as data: those still to be made, and those that are finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from svdpp.config import ClipRequest


@dataclass
class RunPlan:
    """Clips still to be made, in order, and those that are finished already."""

    requests: list[ClipRequest] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
