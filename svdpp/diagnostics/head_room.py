"""Owns the head-room of a run: how much of each memory its ranks left unused."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from svdpp.diagnostics.figures import RankFigures, RunFigures


@dataclass(frozen=True, kw_only=True)
class HeadRoom:
    """Peak memory of the ranks that share one memory, and its size, in bytes."""

    ranks: tuple[int, ...]
    peak_bytes: int
    total_bytes: int

    @property
    def free_share(self) -> float:
        """The part of the memory that was never used."""
        return 1 - self.peak_bytes / self.total_bytes


def head_rooms(figures: RunFigures) -> list[HeadRoom]:
    """The head-room of each memory whose size and users' peaks are known."""
    sharing: dict[str, list[RankFigures]] = defaultdict(list)
    for rank in figures.ranks:
        sharing[rank.memory_id or f"rank {rank.rank}"].append(rank)
    return [
        HeadRoom(
            ranks=tuple(rank.rank for rank in ranks),
            peak_bytes=sum(rank.peak_bytes or 0 for rank in ranks),
            total_bytes=ranks[0].device_bytes,
        )
        for ranks in sharing.values()
        if ranks[0].device_bytes and all(rank.peak_bytes for rank in ranks)
    ]
