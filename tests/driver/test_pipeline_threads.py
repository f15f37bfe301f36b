"""One pipeline, several threads: every clip is made once, and no thread waits for ever."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from svdpp.config import ClipRequest, OutputConfig
from svdpp.driver import ranks
from svdpp.driver.clips import ClipHandle
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import ClosedError, Interrupted, RankError, SvdppError
from svdpp.media.inputs import example_photos
from svdpp.worker.messages import ClipDone, Event, Heartbeat, StepDone
from tests.driver.dummies import HANG_SECONDS, clips, config, pids, plain_hashes
from tests.faults.damage import Damage
from tests.faults.processes import is_there
from tests.models.builders import small_svd

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
    expected = list(enumerate(plain_hashes(6, *range(num_seeds))))
    assert made == [expected] * num_threads


def test_clips_are_made_while_nobody_looks_and_observers_hear_of_them_first() -> None:
    """Far more clips than the events that fit into the ranks' pipes."""
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


def test_handles_can_be_awaited_and_a_pipeline_outlives_the_thread_that_entered_it() -> None:
    async def serve(pipeline: Pipeline) -> list[int]:
        impatient = pipeline.submit(ClipRequest(seed=0))
        with pytest.raises(TimeoutError):  # as when a client goes away; the clip goes on
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(impatient)), 0)
        handles = pipeline.submit(clips(1, 2))
        results = await asyncio.gather(*map(asyncio.wrap_future, [impatient, *handles]))
        return [result.clip for result in results]

    pipeline = Pipeline(config())
    entering = threading.Thread(target=pipeline.__enter__)
    entering.start()
    entering.join()
    assert asyncio.run(serve(pipeline)) == [0, 1, 2]
    assert list(pipeline.results()) == []
    pipeline.close()


# --- the end ------------------------------------------------------------------------------------


@pytest.fixture
def stuck() -> Iterator[Pipeline]:
    """An entered pipeline that has made its first clip and hangs at the second."""
    pipeline = Pipeline(config(), fault=Damage("hang", 1, 1))
    pipeline.__enter__()
    first, _ = pipeline.submit(clips(0, 1))
    first.result(HANG_SECONDS)
    yield pipeline
    assert not any(map(is_there, pids(pipeline)))


def test_leaving_the_block_waits_for_all_clips_and_ends_the_loops_of_threads() -> None:
    """Threads that iterate share the results."""
    with ThreadPoolExecutor(3) as threads, Pipeline(config()) as pipeline:
        handles = pipeline.submit(clips(*range(60)))
        loops = [threads.submit(list, pipeline.results()) for _ in range(3)]
    assert [handle.result(0).clip for handle in handles] == list(range(60))
    found = [result.clip for loop in loops for result in loop.result(HANG_SECONDS)]
    assert sorted(found) == list(range(60))
    assert not any(map(is_there, pids(pipeline)))


def test_closing_at_once_drops_what_is_not_finished(stuck: Pipeline) -> None:
    with ThreadPoolExecutor(2) as threads:
        waiting = [
            threads.submit(lambda: list(stuck.results())),
            threads.submit(lambda: stuck.run(clips(2))),
        ]
        while stuck._clips.num_added < 3:
            assert not waiting[1].done()
        stuck.close(drain=False)
        for each in waiting:
            with pytest.raises(ClosedError, match="was closed before the clip was finished"):
                each.result(HANG_SECONDS)
    stuck.close(drain=False)
    stuck.close()
    assert stuck.run_error is None
    with pytest.raises(ClosedError, match="the pipeline is closed"):
        stuck.submit(clips(3))


def test_leaving_by_an_exception_drops_what_is_not_finished(stuck: Pipeline) -> None:
    with pytest.raises(KeyError, match="own") as caught, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lambda: stuck.run(clips(2)))
        while stuck._clips.num_added < 3:
            assert not waiting.done()
        error = KeyError("own")
        stuck.__exit__(KeyError, error, None)
        assert isinstance(waiting.exception(HANG_SECONDS), ClosedError)
        raise error
    assert not hasattr(caught.value, "__notes__")


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
    """Half of the ranks have the clip: a caller who goes on must not wait for ever."""
    send = stuck._entered.send

    def interrupt(rank: int, message: bytes) -> None:
        send(rank, message)
        raise KeyboardInterrupt

    monkeypatch.setattr(stuck._entered, "send", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stuck.submit(clips(2))
    with pytest.raises(SvdppError, match="only some of the ranks got the clips: KeyboardInterrupt"):
        stuck.close()


def test_a_signals_handler_may_close_the_pipeline(stuck: Pipeline) -> None:
    """The handler runs in the interrupted thread, which may be in a submit or a close."""
    with stuck._submitting, stuck._cleaning:
        stuck.close(drain=False)
        stuck.close()


@pytest.mark.parametrize("drain", [True, False])
def test_every_thread_that_closes_hears_of_a_failure(drain: bool) -> None:
    pipeline = Pipeline(config(), fault=Damage("raise", 0, 0))
    pipeline.__enter__()
    (handle,) = pipeline.submit(clips(0))
    if not drain:  # else it may be closed before the failure
        assert isinstance(handle.exception(HANG_SECONDS), RankError)
    with ThreadPoolExecutor(3) as threads:
        closing = [threads.submit(pipeline.close, drain=drain) for _ in range(3)]
        errors = [each.exception() for each in closing]
    assert any(isinstance(error, RankError) for error in errors)
    assert {str(error) for error in errors if error} == {str(pipeline.run_error)}
    pipeline.close()  # it was raised before, and is raised once


def test_an_observer_that_never_returns_cannot_keep_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "_DROP_SECONDS", 0.1)
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


def test_a_clip_that_is_being_written_leaves_nothing_behind(tmp_path: Path) -> None:
    """The ranks are killed while they write, and their partly written files are removed."""
    demo, image = small_svd(1, steps=1), str(example_photos()[0])
    demo = replace(demo, sampling=replace(demo.sampling, num_frames=14))
    requests = [
        ClipRequest(
            seed=seed, image=image, output=OutputConfig(path=str(tmp_path / f"clip_{seed}.mp4"))
        )
        for seed in range(30)
    ]
    with Pipeline(demo) as pipeline:
        first, *others = pipeline.submit(requests)
        first.result(HANG_SECONDS)
        pipeline.close(drain=False)
    finished = {handle.clip for handle in (first, *others) if handle.exception(0) is None}
    names = {path.name for path in tmp_path.iterdir()}
    assert len(finished) < 30
    assert not [name for name in names if name.startswith(".")]
    for clip in finished:
        assert {f"clip_{clip}.mp4", f"clip_{clip}.mp4.json"} <= names
