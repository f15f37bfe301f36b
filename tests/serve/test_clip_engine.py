"""The engine makes every job of the queue once, and says how it goes."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ClipRequest
from svdpp.driver.clips import ClipHandle
from svdpp.driver.pipeline import Pipeline
from svdpp.serve.job import Job, JobState
from svdpp.serve.queue import JobQueue
from tests.faults.processes import allowing_for_others
from tests.serve.engines import (
    STEPS,
    Serving,
    demo_config,
    demo_job,
    dummy_config,
    hashes,
    latents,
    serving,
)

pytestmark = pytest.mark.processes


def test_every_job_is_made_once_in_order(tmp_path: Path) -> None:
    with serving(tmp_path, dummy_config(2)) as service:
        ids = service.add(*range(12))
        jobs = service.wait_final(ids)
        assert service.engine.state == "ready"
        assert service.engine.restarts == 0
        # The last events of a clip's ranks arrive after its end.
        service.wait(lambda: service.engine.is_idle, "it is not idle")
        service.wait(
            lambda: {rank.doing for rank in service.engine.rank_view.now()} == {"idle"}, "no idle"
        )
        assert {span.rank for span in service.engine.rank_view.spans()} == {0, 1}
        assert {span.video for span in service.engine.rank_view.spans()} == set(ids)
    assert {job.state for job in jobs} == {JobState.COMPLETED}
    assert [job.id for job in service.ended] == ids
    assert latents(jobs) == hashes(dummy_config(2), list(range(12)))
    assert list((tmp_path / "latents").iterdir()) == []


def test_the_grace_finishes_what_it_can_and_the_next_start_goes_on(tmp_path: Path) -> None:
    config = dummy_config(2, step_seconds=0.05)
    # Three clips are in the pipeline, of which the first is made.
    with serving(tmp_path, config, grace=0.4, stop=(1, 1, 5)) as service:
        ids = service.add(*range(8))
        service.wait_for_step(ids[1], 5)
    store = JobQueue(tmp_path)
    states = [job.state for job_id in ids if (job := store.get(job_id))]
    store.close()
    assert JobState.IN_PROGRESS in states
    assert states[0] is JobState.COMPLETED
    assert states[-1] is JobState.QUEUED
    with serving(tmp_path, config) as service:
        jobs = service.wait_final(ids)
    assert [job.attempts for job in jobs] == [0] * 8
    assert latents(jobs) == hashes(config, list(range(8)))
    assert any(job.metadata["resumed_from_step"] for job in jobs)


def test_closing_while_the_ranks_start_is_quick(tmp_path: Path) -> None:
    begun = time.monotonic()
    with serving(tmp_path, dummy_config(4)) as service:
        (job_id,) = service.add(1)
    assert time.monotonic() - begun < 30
    with serving(tmp_path, dummy_config(1)) as service:
        assert service.wait_final([job_id])[0].state is JobState.COMPLETED


def test_a_waiting_job_is_cancelled_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, dummy_config(1), stop=(0, 0, 1)) as service:
        ids = service.add(*range(6))
        service.wait_for_step(ids[0], 1)
        assert service.engine.cancel(ids[5], 0.0)
        assert service.job(ids[5]).state is JobState.CANCELLED
        service.go_on()
        states = [job.state for job in service.wait_final(ids)]
        assert service.engine.cancel(ids[0], 0.0), "it is finished"
        assert service.engine.cancel("no job", 0.0)
    assert states == [JobState.COMPLETED] * 5 + [JobState.CANCELLED]


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_running_job_is_cancelled_when_the_ranks_have_let_go(
    victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, cancel = dummy_config(2, step_seconds=0.2), ClipHandle.cancel
    with serving(tmp_path, config, stop=(1, 0, 4)) as service:

        def cancel_and_go_on(handle: ClipHandle) -> bool:
            is_cancelled = cancel(handle)
            service.go_on()
            return is_cancelled

        monkeypatch.setattr(ClipHandle, "cancel", cancel_and_go_on)
        ids = service.add(*range(4))
        service.wait_for_step(ids[0], 4)
        service.wait(lambda: service.job(ids[victim]).state is JobState.IN_PROGRESS, "it waits")
        assert service.engine.cancel(ids[victim], 60)
        assert service.job(ids[victim]).state is JobState.CANCELLED
        assert all(rank.video != ids[victim] for rank in service.engine.rank_view.now())
        jobs = service.wait_final(ids)
        assert [service.engine.name_of(clip) for clip in range(4)] == ids, "ranks report late"
    others = [job for job in jobs if job.id != ids[victim]]
    assert {job.state for job in others} == {JobState.COMPLETED}
    assert latents(others) == hashes(config, [seed for seed in range(4) if seed != victim])
    assert list((tmp_path / "latents").iterdir()) == []


def test_states_steps_and_places_follow_a_clip(tmp_path: Path) -> None:
    states: list[JobState] = []
    steps: list[int] = []
    places: list[int] = []

    def note(job: Job) -> None:
        if job.seed == 4:
            states.append(job.state)

    config, stop = dummy_config(2, step_seconds=0.02), (1, 4, 5)
    with serving(tmp_path, config, on_changed=note, stop=stop) as service:
        ids = service.add(*range(5))

        def is_seen_on_its_way() -> bool:
            clip = service.engine.feeder.get(ids[4])
            estimate = service.engine.estimates.all(max_age=0.0).get(ids[4])
            steps.append(0 if clip is None else clip.progress.steps_done)
            if estimate is not None and estimate.place is not None:
                places.append(estimate.place)
            return 0 < steps[-1] < STEPS

        service.wait(is_seen_on_its_way, "none of its steps is seen")
        service.go_on()
        service.wait_final(ids)
        service.wait(lambda: len(service.ended) == 5, "not ended")
    assert states == [JobState.IN_PROGRESS, JobState.COMPLETED]
    assert steps == sorted(steps)
    assert places == sorted(places, reverse=True)
    assert len(set(places)) > 1


@pytest.mark.timing
def test_promises_are_kept(tmp_path: Path) -> None:
    config = dummy_config(2, step_seconds=0.1)
    with serving(tmp_path, config) as service:
        service.wait_final(service.add(9))  # the first steps of a process take longer
        ids = []
        for seed in range(6):
            ids += service.add(seed)
            estimate = service.engine.estimates.of(ids[-1])
            assert estimate is not None
            service.store.set_promise(ids[-1], estimate.eta_seconds)
        assert 0 < service.engine.estimates.seconds_until_room() < 3
        jobs = service.wait_final(ids)
        assert service.engine.estimates.of(ids[0]) is None
    promises = [job.promised_seconds or 0.0 for job in jobs]
    errors = [
        ((job.finished_at or 0.0) - job.created_at - promise) / promise
        for job, promise in zip(jobs, promises, strict=True)
    ]
    print("promised", [f"{each:.2f}" for each in promises], "errors", [f"{e:.3f}" for e in errors])
    # On a busy machine the ranks become slower after the promise.
    assert min(errors) > -0.5
    assert max(errors) < allowing_for_others(0.5)


def test_callbacks_that_raise_stop_nothing(tmp_path: Path) -> None:
    def fail(*_: object) -> Any:
        raise ZeroDivisionError

    with serving(tmp_path, dummy_config(2), on_changed=fail, observer=fail) as service:
        jobs = service.wait_final(service.add(1, 2))
        assert service.engine.restarts == 0
    assert {job.state for job in jobs} == {JobState.COMPLETED}


@pytest.mark.long
def test_a_clip_that_a_killed_server_had_finished_is_not_made_again(tmp_path: Path) -> None:
    job = demo_job(tmp_path, 5)
    with serving(tmp_path, demo_config()) as service:
        service.store.add(job, max_open=None)
        service.engine.feeder.wake()
        (first,) = service.wait_final([job.id])
    clip = tmp_path / "clips" / f"{job.id}.mp4"
    written_at = clip.stat().st_mtime_ns
    again = tmp_path / "again"
    again.mkdir()
    for name in ("photos", "clips"):
        (tmp_path / name).rename(again / name)
    with serving(again, demo_config()) as service:  # as if the row had not been changed
        service.store.add(job, max_open=None)
        service.engine.feeder.wake()
        (second,) = service.wait_final([job.id])
    assert second.metadata == first.metadata
    assert (again / "clips" / clip.name).stat().st_mtime_ns == written_at


def test_each_job_has_its_own_parameters_and_fails_alone(tmp_path: Path) -> None:
    config = dummy_config(2)
    samplings = [
        replace(config.sampling, num_inference_steps=steps, num_frames=frames)
        for steps, frames in ((8, 2), (7, 2), (4, 3), (12, 2))
    ]
    with serving(tmp_path, config) as service:
        ids = [service.add(7, sampling=own)[0] for own in samplings]
        jobs = service.wait_final(ids)
        assert service.engine.restarts == 0
    failed = jobs.pop(1)  # the ranks cannot divide 7 steps
    assert failed.error is not None
    assert (failed.state, failed.error["type"]) == (JobState.FAILED, "RequestError")
    assert len(set(latents(jobs))) == 3
    with Pipeline(config.alone()) as pipeline:
        requests = [ClipRequest(seed=7, sampling=job.sampling) for job in jobs]
        expected = pipeline.run(requests)
    assert latents(jobs) == [result.metadata["latents_sha256"] for result in expected]


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _make(service: Serving, seeds: range) -> None:
    """Makes clips, at most 20 of which are open; removes their rows, as the retention does."""
    for first in range(seeds.start, seeds.stop, 20):
        ids = service.add(*range(first, first + 20))
        jobs = service.wait_final(ids)
        assert {job.state for job in jobs} == {JobState.COMPLETED}
        for job_id in ids:
            service.store.remove(job_id)
    service.ended.clear()
    gc.collect()


@pytest.mark.full
@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_clips(tmp_path: Path) -> None:
    with serving(tmp_path, dummy_config(2)) as service:
        _make(service, range(0, 200))
        processes = {"server": os.getpid(), **{f"rank {r}": p for r, p in enumerate(service.pids)}}
        before = {name: _resident(pid) for name, pid in processes.items()}
        _make(service, range(200, 2200))
        after = {name: _resident(pid) for name, pid in processes.items()}
        assert service.engine.restarts == 0
    growth = {name: after[name] / before[name] - 1 for name in processes}
    print({name: f"{100 * share:.2f} %" for name, share in growth.items()})
    # In a process without pytest the server grows by less than 1 %.
    assert growth.pop("server") < 0.03
    assert max(growth.values()) < 0.02, growth
