"""The assignment of ranks to replicas."""

from __future__ import annotations


def assign_replicas(
    world_size: int, replica_size: int, ranks_per_host: int | None
) -> tuple[tuple[int, ...], ...]:
    """The ranks of each replica; as many replicas as possible are within one host.

    Each host gets as many whole replicas as fit. The remaining ranks of all hosts form the other
    replicas, in order. On a single host replica 0 has the first ranks, replica 1 the next ones, and
    so on.

    `replica_size` and `ranks_per_host` divide `world_size`; None: all ranks are on one host.
    """
    on_host = ranks_per_host or world_size
    replica_ranks: list[tuple[int, ...]] = []
    left: list[int] = []
    for first in range(0, world_size, on_host):
        whole = on_host // replica_size * replica_size
        for begin in range(first, first + whole, replica_size):
            replica_ranks.append(tuple(range(begin, begin + replica_size)))
        left += range(first + whole, first + on_host)
    replica_ranks += [
        tuple(left[at : at + replica_size]) for at in range(0, len(left), replica_size)
    ]
    return tuple(sorted(replica_ranks))


def divisors(number: int) -> list[int]:
    """All divisors of `number`, in increasing order."""
    return [each for each in range(1, number + 1) if number % each == 0]
