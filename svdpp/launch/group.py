"""Owns what a group of ranks is, seen from the parent and from one rank, whoever started it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from svdpp.launch.channel import Channel
from svdpp.launch.clock import Clock
from svdpp.launch.world import World


@dataclass(frozen=True)
class RankContext:
    """One rank's side of the group.

    Args:
        world: its place among the ranks.
        backend: of the latents' transfers, `gloo` or `nccl`.
        channel: to the parent.
        join: joins the process group; blocks until all ranks are there.
        leave: leaves the process group, before the process goes on to other work.
        host: this host's name if a launcher started the ranks; else empty.
        clock: this host's clock relative to rank 0's.
        fetch: waits for the file that rank 0 was asked for; None on rank 0's own host.
    """

    world: World
    backend: str
    channel: Channel
    join: Callable[[], None]
    leave: Callable[[], None]
    host: str = ""
    clock: Clock = field(default_factory=Clock)
    fetch: Callable[[], bytes] | None = None


class RankLocation(NamedTuple):
    """Where a rank runs."""

    host: str
    """The host's name."""
    local_rank: int
    """The rank's number on that host."""


#: What a rank runs: a module-level function of its context and of what it was given.
Entry = Callable[[RankContext, Any], None]


class Group(Protocol):
    """The parent's side: ranks started here (`started`), or those of a launcher (`joined`)."""

    world_size: int

    def location(self, rank: int) -> RankLocation:
        """Where `rank` runs."""
        ...

    def send(self, rank: int, message: bytes) -> None:
        """Sends a message to `rank`; if it is gone, `exited` says so."""
        ...

    def poll(self, timeout: float) -> list[tuple[int, bytes]]:
        """Messages that have arrived, each with its rank; waits up to `timeout` seconds."""
        ...

    def exited(self) -> dict[int, int | None]:
        """Exit code of every rank that has ended; minus the signal's number if one ended it.

        None if only its launcher knows. Ranks are in the order in which they were seen to end.
        """
        ...

    def last_words(self, rank: int) -> str:
        """The end of what `rank` and its libraries printed."""
        ...

    def end(self, timeout: float) -> bool:
        """Waits for ranks that have been told to stop; whether all ended without an error."""
        ...

    def kill(self, error: BaseException | None = None) -> None:
        """Ends every rank that is still there, and removes what was made for them.

        Args:
            error: why, for ranks that outlive this; None: all is done.
        """
        ...
