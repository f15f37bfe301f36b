"""Runs a function in several real ranks, with a deadline and the first failing rank's own words."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from svdpp.launch.group import RankContext, start_ranks
from tests.driver.dummies import HANG_SECONDS

RankFunction = Callable[..., Any]


def run_ranks(
    function: RankFunction, world_size: int, *arguments: Any, timeout: float = HANG_SECONDS
) -> list[Any]:
    """Calls `function(context, *arguments)` in each rank; what they return (JSON values), by rank.

    Fails the test with the output of the first rank that did not end with 0.
    """
    group = start_ranks(
        _call,
        (function, arguments),
        world_size=world_size,
        backend="gloo",
        preload=["svdpp.worker.rank"],
    )
    results: dict[int, Any] = {}
    try:
        deadline = time.monotonic() + timeout
        while len(results) < world_size:
            for rank, message in group.poll(0.2):
                results[rank] = json.loads(message)
            failed = [rank for rank, code in group.exited().items() if code]
            if failed:
                raise AssertionError(f"rank {failed[0]}:\n{group.output_tail(failed[0])}")
            assert time.monotonic() < deadline, f"only {sorted(results)} of {world_size} answered"
        assert group.end(60), f"ranks did not end: {group.exited()}"
    finally:
        group.kill()
    return [results[rank] for rank in range(world_size)]


def _call(context: RankContext, argument: tuple[RankFunction, tuple[Any, ...]]) -> None:
    function, arguments = argument
    context.channel.send(json.dumps(function(context, *arguments)).encode())
