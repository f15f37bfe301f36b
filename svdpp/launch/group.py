"""Owns the interface to a group of ranks, for the parent and for each rank, with any launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from svdpp.launch.channel import Channel
from svdpp.launch.clock import Clock
from svdpp.launch.world import World

#: What a program has to do whose ranks are started as multiprocessing starts processes.
GUARD = 'put what it does under `if __name__ == "__main__":`, and run it from a file'


@dataclass(frozen=True)
class RankContext:
    """A rank's view of the group.

    Args:
        world: its rank and the sizes of the world.
        backend: of the latent transfers, `gloo` or `nccl`.
        channel: to the parent.
        join: joins the process group; blocks until all ranks have joined.
        leave: leaves the process group, before the process starts other work.
        host: this host's name if a launcher started the ranks; otherwise empty.
        clock: this host's clocks relative to rank 0's.
        fetch: waits for the file that this rank requested from rank 0; None on rank 0's host.
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


#: The function that a rank runs, at module level; takes the context and one argument.
Entry = Callable[[RankContext, Any], None]


class Group(Protocol):
    """The parent's view: ranks that it started (`started`), or a launcher's ranks (`joined`)."""

    world_size: int

    def location(self, rank: int) -> RankLocation:
        """Where `rank` runs."""
        ...

    def send(self, rank: int, message: bytes) -> None:
        """Sends a message to `rank`. Does not raise if the rank has ended; see `exited`."""
        ...

    def poll(self, timeout: float) -> list[tuple[int, bytes]]:
        """Waits up to `timeout` seconds for messages; returns them, each with its rank."""
        ...

    def exited(self) -> dict[int, int | None]:
        """Exit code of every rank that has ended; minus the signal's number if a signal ended it.

        None if only the launcher knows the code. A launcher's ranks come in the order in which
        their end was noticed.
        """
        ...

    def output_tail(self, rank: int) -> str:
        """The end of the output of `rank` and its libraries."""
        ...

    def end(self, timeout: float) -> bool:
        """Waits for ranks that were commanded to stop; returns whether all ended without error."""
        ...

    def kill(self, error: BaseException | None = None) -> None:
        """Ends every rank that still runs, and removes the group's temporary files.

        Args:
            error: the reason, sent to a launcher's ranks; None if all work is done.
        """
        ...
