"""Life of a pipeline: use by several threads, its end, and memory over many clips."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from svdpp.config import ClipRequest, OutputConfig
from svdpp.driver import ranks
from svdpp.driver.clips import ClipHandle
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import ClosedError, Interrupted, RankError, SvdppError
from svdpp.worker.messages import ClipDone, Event, Heartbeat, StepDone
from tests.support.damage import Damage
from tests.support.dummies import HANG_SECONDS, clips, config, pids, plain_hashes
from tests.support.processes import is_there

pytestmark = pytest.mark.slow


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
    expected = list(enumerate(plain_hashes(6, *range(num_seeds))))
    assert made == [expected] * num_threads


def test_clips_are_made_while_nobody_looks_and_observers_hear_of_them_first() -> None:
    """Clips are made even if nobody reads results, and observers get events before results are set.

    300 clips have far more events than the ranks' pipes can hold.
    """
    all_done, done = threading.Event(), list[int]()

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
        for seed in range(20):
            assert pipeline.submit(ClipRequest(seed=seed)).result(HANG_SECONDS).clip == done[-1]


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


def test_callbacks_may_submit_and_must_not_wait() -> None:
    refused: list[str] = []
    followers: list[ClipHandle] = []
    called = threading.Event()

    def follow(_: object) -> None:
        follower = pipeline.submit(ClipRequest(seed=1))
        followers.append(follower)
        waits: list[Callable[[], object]] = [
            *(follower.result, follower.exception, pipeline.close),
            *(lambda: pipeline.run(clips(2)), lambda: list(pipeline.results())),
        ]
        for wait in waits:
            with pytest.raises(RuntimeError, match="must not wait for the pipeline") as caught:
                wait()
            refused.append(str(caught.value))
        called.set()

    with Pipeline(config()) as pipeline:
        pipeline.submit(ClipRequest(seed=0)).add_done_callback(follow)
        assert called.wait(HANG_SECONDS)
        assert followers[0].result(HANG_SECONDS).clip == 1
    assert len(refused) == 5


# --- the end ------------------------------------------------------------------------------------


@pytest.fixture
def stuck() -> Iterator[Pipeline]:
    """Running pipeline that has made its first clip, and hangs at the second one."""
    pipeline = Pipeline(config(), fault=Damage("hang", 1, 1))
    pipeline.__enter__()
    first, _ = pipeline.submit(clips(0, 1))
    first.result(HANG_SECONDS)
    yield pipeline
    assert not any(map(is_there, pids(pipeline)))


def test_leaving_the_block_waits_for_all_clips_and_ends_the_loops_of_threads() -> None:
    """The end of the block waits for all clips, and then loops over `results` in threads end.

    Several threads that iterate share the results.
    """
    with ThreadPoolExecutor(3) as threads, Pipeline(config()) as pipeline:
        handles = pipeline.submit(clips(*range(60)))
        loops = [threads.submit(list, pipeline.results()) for _ in range(3)]
    assert [handle.result(0).clip for handle in handles] == list(range(60))
    found = [result.clip for loop in loops for result in loop.result(HANG_SECONDS)]
    assert sorted(found) == list(range(60))
    assert not any(map(is_there, pids(pipeline)))


@pytest.mark.parametrize("error", [None, KeyError("own")])
def test_closing_at_once_or_an_exception_drops_what_is_not_finished(
    stuck: Pipeline, error: KeyError | None
) -> None:
    with ThreadPoolExecutor(2) as threads:
        waiting = [
            threads.submit(lambda: list(stuck.results())),
            threads.submit(lambda: stuck.run(clips(2))),
        ]
        while stuck._clips.num_added < 3:
            assert not waiting[1].done()
        if error is None:
            stuck.close(drain=False)
        else:
            stuck.__exit__(KeyError, error, None)
        for each in waiting:
            with pytest.raises(ClosedError, match="was closed before the clip was finished"):
                each.result(HANG_SECONDS)
    assert not hasattr(error, "__notes__")
    stuck.close(drain=False)
    stuck.close()
    assert stuck.run_error is None
    with pytest.raises(ClosedError, match="the pipeline is closed"):
        stuck.submit(clips(3))


def test_a_failure_is_raised_by_whoever_waits(stuck: Pipeline) -> None:
    handle = stuck.submit(ClipRequest(seed=2))
    waits = [handle.result, lambda: stuck.run(clips(3)), lambda: list(stuck.results())]
    with ThreadPoolExecutor(len(waits)) as threads:
        waiting = [threads.submit(wait) for wait in waits]
        while stuck._clips.num_added < 4:  # wait until the run has begun
            assert not waiting[1].done()
        os.kill(pids(stuck)[1], signal.SIGKILL)
        errors = [each.exception(HANG_SECONDS) for each in waiting]
    assert {str(error) for error in errors} == {str(stuck.run_error)}
    assert len({id(error) for error in errors}) == len(waits)
    for use in (lambda: stuck.submit(clips(3)), lambda: stuck.__exit__(None, None, None)):
        with pytest.raises(RankError, match=r"rank 1 .* was killed by SIGKILL"):
            use()
    assert handle.exception(0) is not None


def test_a_close_that_waits_ends_when_another_thread_closes_at_once(stuck: Pipeline) -> None:
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(stuck.close) for _ in range(3)]
        while not stuck._is_closing:
            assert not waiting[0].done()
        with pytest.raises(ClosedError):
            stuck.submit(clips(2))
        stuck.close(drain=False)
        assert [each.result(HANG_SECONDS) for each in waiting] == [None] * 3


def test_a_signal_while_the_block_waits_for_its_clips_ends_the_ranks(
    stuck: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise Interrupted(2)

    monkeypatch.setattr(stuck, "_wait_for_end", interrupt)
    with pytest.raises(Interrupted):
        stuck.__exit__(None, None, None)


def test_a_signal_in_the_middle_of_a_submit_ends_the_run(
    stuck: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal during a submit ends the run.

    Only some ranks have got the clip, so a caller who continued would wait forever.
    """
    send = stuck._running_supervisor.send

    def interrupt(rank: int, message: bytes) -> None:
        send(rank, message)
        raise KeyboardInterrupt

    monkeypatch.setattr(stuck._running_supervisor, "send", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stuck.submit(clips(2))
    with pytest.raises(SvdppError, match="only some of the ranks got the clips: KeyboardInterrupt"):
        stuck.close()


def test_a_signals_handler_may_close_the_pipeline(stuck: Pipeline) -> None:
    """A signal handler may close the pipeline, even while the interrupted thread holds locks.

    The handler runs in the interrupted thread, which may be submitting or closing.
    """
    with stuck._submit_lock, stuck._cleanup_lock:
        stuck.close(drain=False)
        stuck.close()


@pytest.mark.parametrize("drain", [True, False])
def test_every_thread_that_closes_hears_of_a_failure(drain: bool) -> None:
    pipeline = Pipeline(config(), fault=Damage("raise", 0, 0))
    pipeline.__enter__()
    (handle,) = pipeline.submit(clips(0))
    if not drain:  # wait for the failure, which a close could prevent
        assert isinstance(handle.exception(HANG_SECONDS), RankError)
    with ThreadPoolExecutor(3) as threads:
        closing = [threads.submit(pipeline.close, drain=drain) for _ in range(3)]
        errors = [each.exception() for each in closing]
    assert any(isinstance(error, RankError) for error in errors)
    assert {str(error) for error in errors if error} == {str(pipeline.run_error)}
    pipeline.close()  # the error is raised only once


def test_an_observer_that_never_returns_cannot_keep_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "_ABORT_SECONDS", 0.1)
    blocked, release = threading.Event(), threading.Event()

    def block(rank: int, event: Event) -> None:  # noqa: ARG001
        if isinstance(event, ClipDone):
            blocked.set()
            release.wait(HANG_SECONDS)

    pipeline = Pipeline(config())
    pipeline.observe(block)
    pipeline.__enter__()
    handle = pipeline.submit(ClipRequest(seed=0))
    assert blocked.wait(HANG_SECONDS)
    pipeline.close(drain=False)
    assert not any(map(is_there, pids(pipeline)))
    assert isinstance(handle.exception(HANG_SECONDS), ClosedError)
    release.set()
    pipeline._thread.join(HANG_SECONDS)
    assert pipeline.run_error is None


def test_closing_while_the_ranks_start(tmp_path: Path) -> None:
    stop = Damage("hang", 1, 0, place="load", until=str(tmp_path / "never"))
    pipeline = Pipeline(config(), fault=stop)

    def close(rank: int, event: Event) -> None:  # noqa: ARG001
        if isinstance(event, Heartbeat):
            pipeline.close(drain=False)

    pipeline.observe(close)
    with pytest.raises(ClosedError, match="was closed while its ranks started"), pipeline:
        pytest.fail("the block was entered")
    assert not any(map(is_there, pids(pipeline)))


# --- a pipeline that runs for days keeps nothing of clips whose results were returned -----------

HISTORY = 10


def _num_elements() -> int:
    """Return the number of elements in all lists, dicts, sets and deques of this process."""
    gc.collect()
    collections = (list, dict, set, deque)
    return sum(len(each) for each in gc.get_objects() if type(each) in collections)


@pytest.mark.full
def test_many_clips_leave_no_growing_collection_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No collection grows with the number of clips.

    The test reads results from handles, `results` and `run`. Every fiftieth clip is lost, and some
    are cancelled.
    """
    monkeypatch.setattr("svdpp.driver.clips._NUM_RECENT", 100)  # longest history, 1000 otherwise
    bounded = config(2, steps=2)
    lost = _RepeatedDamage("nan", 1, 0)
    with Pipeline(bounded, history_clips=HISTORY, fault=lost) as pipeline:
        _make(pipeline, 100, tmp_path)
        resident = _resident_bytes(pipeline)
        _make(pipeline, 200, tmp_path)
        held = _num_elements()
        _make(pipeline, 500, tmp_path)
        assert _num_elements() < held + 500
        assert pipeline._clips.num_added == 800
        growth = [now / then for then, now in zip(resident, _resident_bytes(pipeline), strict=True)]
        assert max(growth) < 1.02, growth
        assert len(pipeline.failures) == HISTORY
        assert pipeline.trace.summary().clips <= HISTORY
        assert len({step.clip for step in pipeline.trace.steps}) <= HISTORY
        assert pipeline.trace.costs().step_seconds > 0


class _RepeatedDamage(Damage):
    """Fault that a test injects at a rank for every fiftieth clip."""

    def strikes(self, kind: str, rank: int, clip: int) -> bool:
        return (kind, rank) == (self.kind, self.rank) and clip % 50 == 0


def _make(pipeline: Pipeline, count: int, folder: Path) -> None:
    for first in range(0, count, 100):
        requests = [
            ClipRequest(seed=seed, output=OutputConfig(path=str(folder / f"{seed}.mp4")))
            for seed in range(first, first + 98)
        ]
        for request in requests[:48]:
            pipeline.submit(request).exception(HANG_SECONDS)
        quick = replace(pipeline.config.sampling, num_inference_steps=4)
        handles = pipeline.submit([replace(request, sampling=quick) for request in requests[48:]])
        for handle in handles[1::5]:
            handle.cancel()
        for _ in pipeline.results():
            pass
        for seed in range(2):
            pipeline.run(clips(seed))


def _resident_bytes(pipeline: Pipeline) -> list[int]:
    """Return the resident memory of the parent process and of each rank, in bytes."""
    return [psutil.Process(pid).memory_info().rss for pid in (os.getpid(), *pids(pipeline))]
