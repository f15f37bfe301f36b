"""The engine makes every job of the queue once, and says how it goes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ClipRequest
from svdpp.driver.clips import ClipHandle
from svdpp.driver.pipeline import Pipeline
from svdpp.serve.job import JobState
from svdpp.serve.queue import JobQueue
from tests.driver.dummies import HANG_SECONDS
from tests.serve.engines import dummy_config, hashes, latents, serving

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
        service.wait_final(ids[:1])
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
    with serving(tmp_path, dummy_config(4), grace=2 * HANG_SECONDS) as service:
        (job_id,) = service.add(1)
    assert time.monotonic() - begun < HANG_SECONDS
    with serving(tmp_path, dummy_config(1)) as service:
        assert service.wait_final([job_id])[0].state is JobState.COMPLETED


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


def test_an_observer_that_raises_stops_nothing(tmp_path: Path) -> None:
    def fail(*_: object) -> Any:
        raise ZeroDivisionError

    with serving(tmp_path, dummy_config(2), observer=fail) as service:
        jobs = service.wait_final(service.add(1, 2))
        assert service.engine.restarts == 0
    assert {job.state for job in jobs} == {JobState.COMPLETED}


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
