"""Owns the rules that cut `num_steps` denoising steps into ranges, one for each rank."""

from __future__ import annotations

from typing import NamedTuple

from svdpp.errors import RequestError


class StepRange(NamedTuple):
    """Steps `start` to `end` (exclusive) of a clip, done by `rank`.

    `start` is also the number of steps already done when the latent arrives, and `end` when it
    leaves.
    """

    rank: int
    start: int
    end: int

    @property
    def num_steps(self) -> int:
        """Number of steps in the range."""
        return self.end - self.start


def split_steps(num_steps: int, world_size: int) -> tuple[StepRange, ...]:
    """The uniform rule: `start = rank * (num_steps // world_size)`, all ranges of one length.

    Raises:
        RequestError: counts that are not positive, more ranks than steps, or steps that the world
            does not divide; then the nearest step counts that it does are named.
    """
    if num_steps < 1:
        raise RequestError(f"the number of steps must be 1 or more, got {num_steps}")
    if world_size < 1:
        raise RequestError(f"the number of ranks must be 1 or more, got {world_size}")
    if world_size > num_steps:
        raise RequestError(
            f"{world_size} ranks are more than {num_steps} steps: a rank would have nothing to do",
            f"use --steps {world_size} or more, or --world {num_steps} or fewer",
        )
    if num_steps % world_size:
        below = num_steps // world_size * world_size
        raise RequestError(
            f"{num_steps} steps cannot be split evenly over {world_size} ranks; "
            f"the nearest step counts that can are {below} and {below + world_size}",
            f"use --steps {below} or --steps {below + world_size}, "
            f"or --world {largest_world(num_steps, world_size)}",
        )
    count = num_steps // world_size
    return tuple(StepRange(rank, rank * count, (rank + 1) * count) for rank in range(world_size))


def largest_world(num_steps: int, at_most: int) -> int:
    """The largest number of ranks, 1 to `at_most`, that splits `num_steps` evenly."""
    return max(world for world in range(1, at_most + 1) if num_steps % world == 0)
