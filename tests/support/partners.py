"""Two ranks of a CFG pair, simulated by threads of one process."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from svdpp.models.base import Tensors


class Half:
    """Stand-in for the `Partner` of a rank of a CFG pair; predictions go through two queues."""

    def __init__(self, branch: int, own: queue.Queue[Any], other: queue.Queue[Any]) -> None:
        self.branch, self._own, self._other = branch, own, other

    def exchange(self, step: int, evaluate: Callable[[], Tensors]) -> Tensors:
        self._own.put((step, {name: tensor.clone() for name, tensor in evaluate().items()}))
        theirs, tensors = self._other.get(timeout=60)
        assert theirs == step
        return self.received(tensors)

    def received(self, tensors: Tensors) -> Tensors:
        return tensors


def run_pair(run: Callable[[Half], Any], kind: type[Half] = Half) -> list[Any]:
    """Run a function in two threads as both ranks of a CFG pair, and return both results.

    Args:
        run: Function of one rank. Its argument is the rank's `Partner`.
        kind: Class of the `Partner` objects.
    """
    ends: tuple[queue.Queue[Any], queue.Queue[Any]] = queue.Queue(), queue.Queue()
    errors: list[Exception] = []

    def side(branch: int) -> Any:
        try:
            return run(kind(branch, ends[branch], ends[1 - branch]))
        except Exception as error:
            errors.append(error)
            ends[branch].put((-1, {}))  # a wrong step, with which the other rank fails too

    with ThreadPoolExecutor(2) as pool:
        results = [*pool.map(side, (0, 1))]
    if errors:
        raise errors[0]
    return results
