"""The service's engine makes each job's clip once, bitwise identical even if ranks fail."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from svdpp.config import ClipRequest
from svdpp.driver.clips import ClipHandle
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import OutOfMemoryError, OutputError, RankError
from svdpp.launch.world import World
from svdpp.serve.clips import RunningClip
from svdpp.serve.engine import Engine
from svdpp.serve.job import Job, JobState
from svdpp.serve.queue import JobQueue
from svdpp.worker.messages import ActionDone, Event
from tests.support.dummies import plain_hashes
from tests.support.engines import (
    STEPS,
    add,
    demo_config,
    demo_job,
    dummy_config,
    job_of,
    latents,
    serving,
    taken,
)
from tests.support.processes import allowing_for_others

pytestmark = pytest.mark.slow


def test_every_job_is_made_once_in_order(tmp_path: Path) -> None:
    with serving(tmp_path, dummy_config(2)) as service:
        ids = service.add(*range(12))
        jobs = service.wait_final(ids)
        assert service.engine.state == "ready"
        assert service.engine.restarts == 0
        # The ranks' last events about a clip arrive after the clip has ended.
        service.wait(lambda: service.engine.is_idle, "it is not idle")
        service.wait(
            lambda: {rank.doing for rank in service.engine.rank_monitor.snapshot()} == {"idle"},
            "no idle",
        )
        assert {span.rank for span in service.engine.rank_monitor.spans()} == {0, 1}
        assert {span.video for span in service.engine.rank_monitor.spans()} == set(ids)
    assert {job.state for job in jobs} == {JobState.COMPLETED}
    assert [job.id for job in service.ended] == ids
    assert latents(jobs) == plain_hashes(STEPS, *range(12))
    assert list((tmp_path / "latents").iterdir()) == []


def test_the_grace_finishes_what_it_can_and_the_next_start_goes_on(tmp_path: Path) -> None:
    config = dummy_config(2, step_seconds=0.05)
    # Three clips are in the pipeline. The first one is completed; the second one stops at step 5.
    with serving(tmp_path, config, grace=0.4, stop=(1, 1, 5)) as service:
        ids = service.add(*range(8))
        service.wait_for_step(ids[1], 5)
        service.wait_final(ids[:1])
    with closing(JobQueue(tmp_path)) as store:
        states = [job_of(store, id).state for id in ids]
    assert JobState.IN_PROGRESS in states
    assert states[0] is JobState.COMPLETED
    assert states[-1] is JobState.QUEUED
    with serving(tmp_path, config) as service:
        jobs = service.wait_final(ids)
    assert [job.attempts for job in jobs] == [0] * 8
    assert latents(jobs) == plain_hashes(STEPS, *range(8))
    assert any(job.metadata["resumed_from_step"] for job in jobs)


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
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
        assert not service.engine.cancel(ids[victim])
        service.wait_final([ids[victim]])
        assert service.job(ids[victim]).state is JobState.CANCELLED
        # A rank reports its next action just after it has dropped the clip.
        ranks = service.engine.rank_monitor.snapshot
        service.wait(lambda: all(rank.video != ids[victim] for rank in ranks()), "a rank has it")
        jobs = service.wait_final(ids)
        assert [service.engine.name_of(clip) for clip in range(4)] == ids, "ranks report late"
    others = [job for job in jobs if job.id != ids[victim]]
    assert {job.state for job in others} == {JobState.COMPLETED}
    assert latents(others) == plain_hashes(STEPS, *(seed for seed in range(4) if seed != victim))
    assert list((tmp_path / "latents").iterdir()) == []


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
    failed = jobs.pop(1)  # two ranks cannot divide 7 steps equally
    assert failed.error is not None
    assert (failed.state, failed.error["type"]) == (JobState.FAILED, "RequestError")
    assert len(set(latents(jobs))) == 3
    with Pipeline(config.single_rank()) as pipeline:
        requests = [ClipRequest(seed=7, sampling=job.sampling) for job in jobs]
        expected = pipeline.run(requests)
    assert latents(jobs) == [result.metadata["latents_sha256"] for result in expected]


@pytest.fixture(scope="module")
def photo_24mp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photo") / "large.jpg"
    Image.linear_gradient("L").resize((6000, 4000)).save(path)
    return path


def _large_job(folder: Path, seed: int, photo: Path) -> Job:
    return replace(demo_job(folder, seed, photo), input_pixels=24_000_000)


@pytest.mark.full
def test_a_small_clip_goes_before_a_large_image_and_both_have_their_bits(
    tmp_path: Path, photo_24mp: Path
) -> None:
    """A clip with a small image overtakes clips whose large images are still being prepared.

    An image that cannot be prepared makes only its own clip fail.
    """
    waits: dict[int, float] = {}

    def note(_: int, event: Event) -> None:
        if isinstance(event, ActionDone) and "image" in event.waits:
            waits[event.action.clip] = event.waits["image"]

    with serving(tmp_path, demo_config(), observer=note) as service:
        service.wait(lambda: service.engine.is_idle, "it is not idle")

        large = [_large_job(tmp_path, seed, photo_24mp) for seed in (1, 2, 4)]
        (tmp_path / "photos" / large[2].input_file).unlink()
        done = service.made(*large[:2], demo_job(tmp_path, 3), large[2])
        lost = done.pop()
        # The large images were prepared in advance, so no rank has waited for them.
        assert max(waits[1], waits[2]) < allowing_for_others(0.5)
        in_order = service.made(*(demo_job(tmp_path, seed, photo_24mp) for seed in (1, 2)))
    assert lost.state is JobState.FAILED
    assert "does not exist" in (lost.error or {})["message"]
    assert {job.state for job in done + in_order} == {JobState.COMPLETED}
    assert min(done, key=lambda job: job.finished_at or 0).seed == 3
    assert latents(done[:2]) == latents(in_order)


def test_a_clip_can_be_cancelled_while_its_image_is_prepared(
    tmp_path: Path, photo_24mp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clip whose image is never ready can be cancelled, and the next clip is made."""
    asked: list[ClipRequest] = []
    prepare = Pipeline.prepare_image

    def prepare_others(pipeline: Pipeline, request: ClipRequest) -> None:
        asked.append(request)
        if len(asked) > 1:
            prepare(pipeline, request)

    monkeypatch.setattr(Pipeline, "prepare_image", prepare_others)
    with serving(tmp_path, demo_config()) as service:
        service.wait(lambda: service.engine.is_idle, "it is not idle")
        ids = service.store_jobs(*(_large_job(tmp_path, seed, photo_24mp) for seed in (1, 2)))
        service.wait(lambda: asked, "nothing is prepared")
        assert not service.engine.is_idle
        assert not service.engine.cancel(ids[0])
        done = service.wait_final(ids)
        service.wait(lambda: service.engine.is_idle, "it is not idle")
    assert [job.state for job in done] == [JobState.CANCELLED, JobState.COMPLETED]


def test_after_a_kill_the_clips_continue_to_the_same_bits(tmp_path: Path) -> None:
    config = dummy_config(2, step_seconds=0.05)
    with serving(tmp_path, config, stop=(1, 1, 5)) as service:
        ids = service.add(*range(5))
        service.wait_for_step(ids[1], 5)  # rank 1 works on this clip, rank 0 on the next one
        service.kill(1)
        service.go_on()
        jobs = service.wait_final(ids)
        assert service.engine.restarts == 1
        resumed = [job.metadata["resumed_from_step"] for job in jobs]
        # The engine reports the end of a clip after the queue has it.
        service.wait(lambda: len(service.ended) == len(ids), "the end of a clip is not reported")
        assert [job.id for job in service.ended] == ids
        service.kill(0)  # the rank is idle, so its end counts against no clip
        service.wait(lambda: service.engine.restarts == 2, "no restart")
        jobs += service.wait_final(service.add(5))
    assert {job.state for job in jobs} == {JobState.COMPLETED}
    assert [job.attempts for job in jobs] == [0, 1, 0, 0, 0, 0]
    assert resumed[1] == 4
    assert latents(jobs) == plain_hashes(STEPS, *range(6))
    assert list((tmp_path / "latents").iterdir()) == []


def test_file_faults_and_deaths_of_ranks_are_counted_apart(tmp_path: Path) -> None:
    no_file, died = OutputError("the disk is away"), RankError("rank 1 died", details={"rank": 1})
    with closing(JobQueue(tmp_path)) as queue:
        engine = Engine(dummy_config(2), queue)
        dispatcher, id = engine.dispatcher, add(queue)

        def fail() -> Job:
            dispatcher._fail_or_requeue(taken(queue), no_file)
            return job_of(queue, id)

        def lose_ranks() -> Job:
            job = taken(queue)
            dispatcher._clips[id] = RunningClip(job, ClipRequest(seed=1), {})
            dispatcher.requeue_all(died, {id})
            return job_of(queue, id)

        for job, attempts in ((fail(), 0), (lose_ranks(), 1)):
            assert (job.state, job.attempts) == (JobState.QUEUED, attempts)
        failed = lose_ranks()
        assert failed.error is not None
        assert "the ranks died 2 times during this clip" in failed.error["message"]
        id = add(queue)
        assert [fail().state, fail().state] == [JobState.QUEUED, JobState.FAILED]


def test_a_clip_during_which_ranks_die_twice_fails_by_name(tmp_path: Path, told: list[str]) -> None:
    config = dummy_config(2)
    with serving(tmp_path, config, stop=(0, 0, 1)) as service:
        ids = service.add(*range(4))
        for death in (1, 2):
            service.wait_for_step(ids[0], 1)
            service.kill(0)
            service.wait(lambda death=death: service.engine.restarts == death, "no restart")  # type: ignore[misc]
        assert service.engine._back_off == pytest.approx(0.2)
        service.go_on()
        jobs = service.wait_final(ids)
        service.wait(lambda: service.engine._back_off == 0.05, "it is not reset")
    assert any(f"was killed by SIGKILL at {ids[0]}, step" in line for line in told), told
    assert [job.state for job in jobs] == [JobState.FAILED] + [JobState.COMPLETED] * 3
    assert jobs[0].error is not None
    assert jobs[0].error["type"] == "RankError"
    assert "died 2 times during this clip" in jobs[0].error["message"]
    assert "was killed by SIGKILL" in jobs[0].error["message"]
    assert latents(jobs[1:]) == plain_hashes(STEPS, 1, 2, 3)
    assert list((tmp_path / "latents").iterdir()) == []


def test_a_checkpoint_that_does_not_fit_starts_the_clip_again(tmp_path: Path) -> None:
    config = dummy_config(2, step_seconds=0.05)
    with serving(tmp_path, config, stop=(1, 0, 5)) as service:
        ids = service.add(0, 1)
        service.wait_for_step(ids[0], 5)
        kept = (tmp_path / "latents").glob
        service.wait(lambda: len(list(kept("*_step4.safetensors"))) == 2, "no checkpoints")
        for path in kept("*_step4.safetensors"):
            path.write_bytes(path.read_bytes()[:-8])
        service.kill(1)
        service.go_on()
        jobs = service.wait_final(ids)
        assert service.engine.restarts == 1
    assert {job.state for job in jobs} == {JobState.COMPLETED}
    assert latents(jobs) == plain_hashes(STEPS, 0, 1)


def test_a_full_disk_delays_a_result_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    monkeypatch.setattr("svdpp.serve.dispatcher._RETRY_SECONDS", 0.01)
    with serving(tmp_path, dummy_config(1)) as service:
        complete, refusals = service.store.complete, iter(["full", "full", "read-only", "full"])

        def full(*arguments: Any) -> bool:
            if (refusal := next(refusals, None)) is not None:
                raise OutputError(refusal)
            return complete(*arguments)

        monkeypatch.setattr(service.store, "complete", full)
        (job,) = service.wait_final(service.add(1))
        assert job.state is JobState.COMPLETED
        assert service.engine.restarts == 0
        assert list(refusals) == []
    assert [line.rpartition(": ")[2] for line in told] == ["full", "read-only", "full"]


def test_ranks_that_cannot_start_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = iter(range(2))

    def full(*arguments: Any, **options: Any) -> Pipeline:
        if next(refusals, None) is not None:
            raise OutOfMemoryError("too little memory is free")
        return Pipeline(*arguments, **options)

    monkeypatch.setattr("svdpp.serve.engine.Pipeline", full)
    with serving(tmp_path, dummy_config(1)) as service:
        (job_id,) = service.add(1)
        assert service.wait_final([job_id])[0].attempts == 0
        assert service.engine.restarts == 2


def test_ranks_of_a_launcher_that_die_end_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dummy_config(1, step_seconds=0.1)
    world = World(rank=0, local_rank=0, size=1, local_size=1)
    monkeypatch.setattr("svdpp.serve.engine.find_world", lambda: world)
    with serving(tmp_path, config, stop=(0, 0, 2)) as service:
        (job_id,) = service.add(1)
        service.wait_for_step(job_id, 2)
        service.kill(0)
        service.wait(lambda: service.engine.fatal is not None, "it goes on")
        assert "SIGKILL" in str(service.engine.fatal)
        assert service.job(job_id).state is JobState.QUEUED
    monkeypatch.undo()
    with serving(tmp_path, config) as service:
        assert service.wait_final([job_id])[0].state is JobState.COMPLETED


def test_checkpoints_of_a_killed_server_are_removed_after_the_last_clip(tmp_path: Path) -> None:
    left = tmp_path / "latents" / f"{'0' * 64}_step3.safetensors"
    with serving(tmp_path, dummy_config(2), stop=(0, 1, 1)) as service:
        ids = service.add(0, 1)
        service.wait_for_step(ids[1], 1)  # the queue is empty, and one clip is in progress
        left.write_bytes(b"late")
        service.go_on()
        service.wait_final(ids)
        service.wait(lambda: not left.exists(), "the checkpoint stays")
