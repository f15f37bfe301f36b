"""One pipeline, several threads: every clip is made once, and no thread waits for ever."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, get_args

import pytest

from svdpp.config import ClipRequest
from svdpp.driver.clips import ClipHandle
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import ClosedError, RankError, SvdppError
from svdpp.worker.messages import ClipDone, Event, StepDone
from tests.driver.dummies import HANG_SECONDS, clips, config, pids
from tests.faults.damage import Damage
from tests.faults.processes import is_there

pytestmark = pytest.mark.processes


def test_clips_of_threads_that_submit_at_once_are_all_made() -> None:
    num_threads, num_seeds = 4, 20
    together = threading.Barrier(num_threads)

    def submit(pipeline: Pipeline) -> list[tuple[int, str]]:
        together.wait()
        handles = [pipeline.submit(ClipRequest(seed=seed)) for seed in range(num_seeds)]
        results = [handle.result(HANG_SECONDS) for handle in handles]
        return [(result.request.seed, result.metadata["latents_sha256"]) for result in results]

    with Pipeline(config(3, steps=6)) as pipeline, ThreadPoolExecutor(num_threads) as threads:
        made = list(threads.map(submit, [pipeline] * num_threads))
        alone = pipeline.run(clips(*range(num_seeds)))
    expected = [(each.request.seed, each.metadata["latents_sha256"]) for each in alone]
    assert made == [expected] * num_threads
    assert len(set(expected)) == num_seeds


def test_clips_are_made_while_nobody_looks() -> None:
    """Far more clips than the events that fit into the ranks' pipes."""
    all_done, done = threading.Event(), []

    def count(rank: int, event: Event) -> None:  # noqa: ARG001
        if isinstance(event, ClipDone):
            done.append(event.clip)
            if len(done) == 300:
                all_done.set()

    pipeline = Pipeline(config())
    pipeline.observe(count)
    with pipeline:
        handles = pipeline.submit(clips(*range(300)))
        assert all_done.wait(HANG_SECONDS)
        assert handles[-1].result(HANG_SECONDS).clip == 299
    assert sorted(done) == list(range(300))


def test_a_failure_is_raised_by_whoever_waits(tmp_path: Path) -> None:
    stop = Damage("hang", 1, 1, place="step2", until=str(tmp_path / "never"))
    pipeline = Pipeline(config(), fault=stop)
    reached = threading.Event()
    pipeline.observe(lambda _, event: reached.set() if isinstance(event, ClipDone) else None)
    with pytest.raises(RankError, match=r"rank 1 .* was killed by SIGKILL"), pipeline:
        handle = pipeline.submit(clips(0, 1))[1]
        assert reached.wait(HANG_SECONDS)
        waits: list[Callable[[], object]] = [
            handle.result,
            lambda: pipeline.run(clips(2)),
            lambda: list(pipeline.results()),
        ]
        with ThreadPoolExecutor(len(waits)) as threads:
            waiting = [threads.submit(wait) for wait in waits]
            while pipeline._clips.num_added < 3:  # the run is in progress
                assert not waiting[1].done()
            os.kill(pids(pipeline)[1], signal.SIGKILL)
            errors = [each.exception(HANG_SECONDS) for each in waiting]
        assert {str(error) for error in errors} == {str(pipeline.run_error)}
        assert len({id(error) for error in errors}) == len(waits)
        with pytest.raises(RankError, match="rank 1"):
            pipeline.submit(clips(3))
        assert handle.exception(0) is not None


def test_a_block_left_by_another_error_still_tells_of_the_failure() -> None:
    pipeline = Pipeline(config(), fault=Damage("raise", 1, 0))
    with pytest.raises(KeyError) as caught, pipeline:
        handle = pipeline.submit(ClipRequest(seed=0))
        assert isinstance(handle.exception(HANG_SECONDS), RankError)
        raise KeyError("of the caller's own")
    assert "The run had failed before: rank 1 " in caught.value.__notes__[0]


def test_an_observers_exception_ends_the_run() -> None:
    def object_to(rank: int, event: Event) -> None:  # noqa: ARG001
        if isinstance(event, StepDone) and event.clip == 1:
            raise ZeroDivisionError("of the observer's own")

    pipeline = Pipeline(config())
    pipeline.observe(object_to)
    with pytest.raises(ZeroDivisionError, match="of the observer's own"), pipeline:
        pipeline.submit(clips(0, 1))
        assert [result.clip for result in pipeline.results()] == [0]


def test_observers_have_heard_of_a_clip_before_its_result_is_there() -> None:
    heard: list[int] = []
    pipeline = Pipeline(config())
    pipeline.observe(
        lambda _, event: heard.append(event.clip) if isinstance(event, ClipDone) else None
    )
    with pipeline:
        for seed in range(20):
            assert pipeline.submit(ClipRequest(seed=seed)).result(HANG_SECONDS).clip == heard[-1]


def test_callbacks_may_submit_and_must_not_wait() -> None:
    refused: list[BaseException] = []
    followers: list[ClipHandle] = []
    called = threading.Event()

    with Pipeline(config()) as pipeline:

        def follow(_: object) -> None:
            followers.append(pipeline.submit(ClipRequest(seed=1)))
            waits: list[Callable[[], object]] = [
                followers[0].result,
                followers[0].exception,
                lambda: pipeline.run(clips(2)),
                lambda: list(pipeline.results()),
                pipeline.close,
            ]
            for wait in waits:
                try:
                    wait()
                except RuntimeError as error:
                    refused.append(error)
            called.set()

        pipeline.submit(ClipRequest(seed=0)).add_done_callback(follow)
        assert called.wait(HANG_SECONDS)
        assert followers[0].result(HANG_SECONDS).clip == 1
    assert [str(error).partition(":")[0] for error in refused] == [
        "observers and callbacks must not wait for the pipeline"
    ] * 5


def test_handles_can_be_awaited() -> None:
    async def serve(pipeline: Pipeline) -> list[int]:
        impatient = pipeline.submit(ClipRequest(seed=0))
        with pytest.raises(TimeoutError):  # as when a client goes away; the clip goes on
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(impatient)), 0)
        handles = pipeline.submit(clips(1, 2))
        results = await asyncio.gather(*map(asyncio.wrap_future, [impatient, *handles]))
        return [result.clip for result in results]

    with Pipeline(config()) as pipeline:
        assert asyncio.run(serve(pipeline)) == [0, 1, 2]
        assert list(pipeline.results()) == []


def test_a_pipeline_outlives_the_thread_that_entered_it() -> None:
    pipeline = Pipeline(config())
    entering = threading.Thread(target=pipeline.__enter__)
    entering.start()
    entering.join()
    assert pipeline.run(ClipRequest(seed=0)).clip == 0
    pipeline.close()


# --- a pipeline with many threads ends in any way, at any moment --------------------------------

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
@pytest.mark.parametrize("end", get_args(End))
def test_no_thread_is_left_waiting(end: End) -> None:
    for seed in range(5):
        error = Life(seed, end).live()
        expected = _EXPECTED[end]
        assert error is None if expected is None else isinstance(error, expected), (seed, error)
