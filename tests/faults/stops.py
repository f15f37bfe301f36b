"""A fault that only tests plant: a rank that raises or stands still at a named place."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from svdpp.worker.fault_injection import InjectedFault


@dataclass(frozen=True)
class InjectedStop(InjectedFault):
    """A rank that stands still at a place of its life, with its heart beating.

    Args:
        kind: what it does when it may go on: `raise` an exception, or, after a `hang`, its work.
        clip: ignored at `start`, `load` and `join`, which come before all clips.
        place: `start` (before the rank's first report), `load` (of the model), `join` (before it
            connects to the other ranks), `step<k>` of the clip, or another action of it by its
            name: `encode`, `recv`, `send`, `decode`, `deliver`.
        until: path of a file; the rank goes on when there is one. Empty: never.
    """

    kind: Literal["raise", "hang"]
    place: str = "start"
    until: str = ""

    def strikes(self, kind: str, rank: int, clip: int) -> bool:  # noqa: ARG002
        """Never: this fault has a place of its own."""
        return False

    def reach(self, rank: int, clip: int, place: str) -> None:
        """See `InjectedFault.reach`."""
        own_clip = clip if place in ("start", "load", "join") else self.clip
        if (rank, clip, place) != (self.rank, own_clip, self.place):
            return
        while not (self.until and Path(self.until).exists()):
            time.sleep(0.02)
        if self.kind == "raise":
            raise RuntimeError("a planted fault")
