"""How a pipeline ends: with all clips made, or at once; from any thread, any number of times."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from svdpp.config import ClipRequest, ModelConfig, OutputConfig, PipelineConfig, SvdSampling
from svdpp.driver import ranks
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import ClosedError, Interrupted, RankError, SvdppError
from svdpp.media.inputs import example_photos
from svdpp.worker.messages import ClipDone, Event, Heartbeat
from tests.driver.dummies import HANG_SECONDS, clips, config, pids
from tests.faults.damage import Damage
from tests.faults.processes import is_there

pytestmark = pytest.mark.processes

#: Hangs for ever at its second clip.
STUCK = Damage("hang", 1, 1)


@pytest.fixture
def stuck() -> Iterator[Pipeline]:
    """An entered pipeline that has made its first clip and hangs at the second."""
    pipeline = Pipeline(config(), fault=STUCK)
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
    sampling = SvdSampling(
        num_inference_steps=1, height=64, width=64, num_frames=14, max_guidance_scale=1.0
    )
    demo = PipelineConfig(world_size=1, model=ModelConfig(name="demo"), sampling=sampling)
    image = str(example_photos()[0])
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
