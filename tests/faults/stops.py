"""A fault that only tests inject: a rank that raises or hangs at a named place."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.faults.damage import Damage


@dataclass(frozen=True)
class InjectedStop(Damage):
    """A rank that hangs at a place but goes on sending heartbeats.

    Args:
        kind: how it continues: `raise` raises an exception, `hang` goes on with the work.
        clip: ignored at `start`, `load` and `join`, which come before all clips.
        place: `start` (before the rank's first report), `load` (of the model), `join` (before it
            connects to the other ranks), `step<k>` of the clip, or another action by its name:
            `encode`, `recv`, `send`, `decode`, `finish`.
        until: path of a file; the rank continues once it exists. Empty: never.
    """

    kind: Literal["raise", "hang"]
    place: str = "start"
    until: str = ""

    def strikes(self, kind: str, rank: int, clip: int) -> bool:  # noqa: ARG002
        """Never: this fault acts in `reach`."""
        return False

    def is_at(self, rank: int, clip: int, place: str) -> bool:
        """Whether this is the rank, clip and place at which it acts."""
        own_clip = clip if place in ("start", "load", "join") else self.clip
        return (rank, clip, place) == (self.rank, own_clip, self.place)

    def reach(self, rank: int, clip: int, place: str) -> None:
        if not self.is_at(rank, clip, place):
            return
        while not (self.until and Path(self.until).exists()):
            time.sleep(0.02)
        if self.kind == "raise":
            raise RuntimeError("an injected fault")
