"""Owns planted stops: a rank that raises or stands still at a named place, for the fault tests."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal

from svdpp.runtime.faults import PlantedFault


@dataclass(frozen=True)
class PlantedStop(PlantedFault):
    """A fault at a place of a rank's life rather than at a clip's first step.

    Args:
        kind: `raise`, or `hang` for `seconds`, with the heart beating unless the place is `start`.
        clip: counted for nothing at `start` and `load`, which come before all clips.
        place: `start` (before the rank says a word), `load` (of the model), `step<k>` of the clip,
            or another action of it by its name: `encode`, `recv`, `send`, `decode`, `deliver`.
        seconds: after which a hang goes on: a slow rank.
    """

    kind: Literal["raise", "hang"]
    place: str = "start"
    seconds: float = math.inf

    def strikes(self, kind: str, rank: int, clip: int) -> bool:  # noqa: ARG002
        """Never: this fault has a place of its own."""
        return False

    def reach(self, rank: int, clip: int, place: str) -> None:
        """See `PlantedFault.reach`."""
        own_clip = clip if place in ("start", "load") else self.clip
        if (rank, clip, place) != (self.rank, own_clip, self.place):
            return
        if self.kind == "raise":
            raise RuntimeError("a planted fault")
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            time.sleep(0.1)
