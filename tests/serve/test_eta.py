"""The ETA of a clip: the work before it, divided among all ranks, and its own, as measured."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from svdpp.config import ClipRequest
from svdpp.driver.clips import ClipProgress
from svdpp.plan.actions import Action
from svdpp.serve.clips import RunningClip
from svdpp.serve.fleet import Estimate, Estimates
from svdpp.serve.queue import JobQueue
from svdpp.worker.messages import ActionDone, StepDone
from tests.serve.engines import SAMPLING, STEPS, dummy_job

HALF = replace(SAMPLING, width=SAMPLING.width // 2)


@pytest.fixture(autouse=True)
def _stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)


def _clip(index: int, steps_done: int | None, passed: float = 0.0, **values: Any) -> RunningClip:
    """One that the ranks have; `steps_done` is None before it is begun."""
    clip = RunningClip(dummy_job(index, **values), ClipRequest(seed=0), {})
    rank = None if steps_done is None else 0
    handle: Any = SimpleNamespace(progress=ClipProgress(steps_done or 0, STEPS, rank))
    return replace(clip, handle=handle, moved_at=time.monotonic() - passed)


def _estimates(
    store: JobQueue, *clips: RunningClip, ranks: int = 1, servers: int = 1, preparing: Any = None
) -> Estimates:
    """Of a server whose clips take 1 s to encode, 2 s a step, and 4 s to decode."""
    feeder = SimpleNamespace(
        clips=lambda: list(clips), preparing=preparing, num_free=2, latest={0: dummy_job(0)}
    )
    config = SimpleNamespace(world_size=ranks, cfg_parallel=1)
    engine: Any = SimpleNamespace(feeder=feeder, config=config)
    estimates = Estimates(store, engine, lambda: servers)
    for seconds in (9.0, 2.0, 2.0):  # the rank warms up
        estimates(0, StepDone(clip=0, step=1, seconds=seconds))
    for action, seconds in (("ENCODE c0 @0", 1.0), ("DECODE c0 @8", 4.0)):
        end = 1.0 + seconds
        estimates(0, ActionDone(action=Action.parse(action), start=1.0, end=end, waited=0.0))
    return estimates


WHOLE = 1 + 2 * STEPS + 4


@pytest.mark.parametrize(("ranks", "servers"), [(1, 1), (4, 1), (2, 3)])
def test_clips_that_wait_share_all_ranks_in_the_order_of_their_turns(
    store: JobQueue, ranks: int, servers: int
) -> None:
    for seed in range(7):
        store.add(dummy_job(seed), max_open=None)
    found = _estimates(store, ranks=ranks, servers=servers).all()
    assert list(found) == [id for id, _ in store.waiting()]
    assert [one.place for one in found.values()] == list(range(7))
    expected = [WHOLE * (1 + place / (ranks * servers)) for place in range(7)]
    assert [one.eta_seconds for one in found.values()] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("steps_done", "passed", "left"),
    [(0, 0.5, WHOLE - 0.5), (0, 99, WHOLE - 3), (5, 1, 9), (5, 99, 8), (STEPS, 3, 1)],
)
def test_of_a_clip_at_work_its_rest_counts_until_its_next_event(
    store: JobQueue, steps_done: int, passed: float, left: float
) -> None:
    clip = _clip(1, steps_done, passed)
    found = _estimates(store, clip).all()[clip.job.id]
    assert found.place is None
    assert found.eta_seconds == pytest.approx(left)


def test_the_next_clip_begins_once_the_first_rank_is_free(store: JobQueue) -> None:
    begun, following = _clip(0, 1), _clip(1, None)
    waiting = store.add(dummy_job(2, sampling=HALF), max_open=None)
    found = _estimates(store, begun, following, ranks=4).all()
    free = WHOLE / 4 - 1 - 2
    assert found[following.job.id].eta_seconds == pytest.approx(free + WHOLE)
    expected = free + WHOLE / 4 + WHOLE / 2
    assert found[waiting.id].eta_seconds == pytest.approx(expected)
    assert [one.place for one in found.values()] == [None, 0, 1]


def test_others_go_before_a_large_image(store: JobQueue) -> None:
    jobs = [store.add(dummy_job(seed), max_open=None) for seed in range(4)]
    large = store.take_next()
    assert large is not None
    prepared_at = time.monotonic() + 100
    preparing = replace(_clip(0, None), job=large, prepared_at=prepared_at)
    found = _estimates(store, preparing=preparing).all()
    assert [found[job.id].place for job in jobs] == [2, 0, 1, 3]
    etas = [found[job.id].eta_seconds for job in jobs]
    assert etas == pytest.approx([3 * WHOLE + 100, WHOLE, 2 * WHOLE, 4 * WHOLE + 100])


def test_before_a_step_is_measured_there_are_places_alone(store: JobQueue) -> None:
    job = store.add(dummy_job(1), max_open=None)
    estimates = _estimates(store)
    assert estimates.elsewhere(replace(job, step=5)) == pytest.approx(2 * (STEPS - 5) + 4)
    estimates._samples["step"].clear()
    assert estimates.of(job.id) == Estimate(0, None)
    assert estimates.elsewhere(job) is None
    assert estimates.seconds_until_room() == 5.0
