"""A pipeline with many threads ends in any way, at any moment: no thread is left waiting."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, get_args

import pytest

from svdpp.config import ClipRequest
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import ClosedError, RankError, SvdppError
from svdpp.worker.messages import Event
from tests.driver.dummies import HANG_SECONDS, clips, config, pids
from tests.faults.processes import is_there

End = Literal["drain", "drop", "kill", "raise", "observer"]
_EXPECTED: dict[End, type[BaseException] | None] = {
    "drain": None,
    "drop": None,
    "kill": RankError,
    "raise": KeyError,
    "observer": ZeroDivisionError,
}


class Life:
    """A pipeline with threads that submit, wait for handles, run, and take results, until its end.

    Args:
        seed: of its random choices.
        end: what ends it, after a random number of events.
    """

    def __init__(self, seed: int, end: End) -> None:
        self._random = random.Random(seed)
        self._end = end
        self._num_events = 0
        self._last_event = self._random.randrange(1, 400)
        self._is_time = threading.Event()
        self._pipeline = Pipeline(
            config(self._random.choice([1, 2, 3]), steps=6),
            history_clips=self._random.choice([None, 3]),
        )
        self._pipeline.observe(self._see)

    def live(self) -> BaseException | None:
        """The error that leaves the block; all threads have ended then."""
        left: BaseException | None = None
        seeds = [self._random.random() for _ in range(3)]
        with ThreadPoolExecutor(5) as threads:
            try:
                with self._pipeline:
                    users = [threads.submit(self._use, seed) for seed in seeds]
                    users += [threads.submit(self._take) for _ in range(2)]
                    assert self._is_time.wait(HANG_SECONDS)
                    self._act()
            except (SvdppError, KeyError, ZeroDivisionError) as error:
                left = error
            for user in users:
                error = user.exception(HANG_SECONDS)
                assert isinstance(error, (ClosedError, _EXPECTED[self._end] or ClosedError)), error
        assert not any(map(is_there, pids(self._pipeline)))
        return left

    def _act(self) -> None:
        if self._end == "drop":
            self._pipeline.close(drain=False)
        if self._end == "kill":
            os.kill(self._random.choice(pids(self._pipeline)), signal.SIGKILL)
        if self._end == "raise":
            raise KeyError(self._end)

    def _see(self, rank: int, event: Event) -> None:  # noqa: ARG002
        self._num_events += 1
        if self._num_events == self._last_event:
            self._is_time.set()
            if self._end == "observer":
                raise ZeroDivisionError

    def _use(self, seed: float) -> None:
        chance = random.Random(seed)
        while True:
            handle = self._pipeline.submit(ClipRequest(seed=chance.randrange(100)))
            if chance.random() < 0.7:
                handle.result(HANG_SECONDS)
            elif chance.random() < 0.3:
                handle.cancel()
            elif chance.random() < 0.7:
                assert len(self._pipeline.run(clips(1, 2))) == 2

    def _take(self) -> None:
        while True:
            for result in self._pipeline.results():
                assert result.metadata["latents_sha256"]
            time.sleep(0.01)  # gives the processor to the ranks


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("end", get_args(End))
def test_no_thread_is_left_waiting(end: End) -> None:
    for seed in range(5):
        error = Life(seed, end).live()
        expected = _EXPECTED[end]
        assert error is None if expected is None else isinstance(error, expected), (seed, error)
