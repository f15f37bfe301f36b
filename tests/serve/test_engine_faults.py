"""Whatever happens to the ranks, the engine makes every job once, to the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from loguru import logger

from svdpp.config import ClipRequest
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import OutOfMemoryError, OutputError
from svdpp.launch.world import World
from svdpp.serve.job import JobState
from tests.serve.engines import (
    Serving,
    demo_config,
    demo_job,
    dummy_config,
    hashes,
    latents,
    serving,
)

pytestmark = pytest.mark.processes


def test_after_a_kill_the_clips_continue_to_the_same_bits(tmp_path: Path) -> None:
    config = dummy_config(2, step_seconds=0.05)
    with serving(tmp_path, config, stop=(1, 1, 5)) as service:
        ids = service.add(*range(5))
        service.wait_for_step(ids[1], 5)  # rank 1 works on it, rank 0 on the next one
        service.kill(1)
        service.go_on()
        jobs = service.wait_final(ids)
        assert service.engine.restarts == 1
        resumed = [job.metadata["resumed_from_step"] for job in jobs]
    assert {job.state for job in jobs} == {JobState.COMPLETED}
    assert [job.id for job in service.ended] == ids
    assert [job.attempts for job in jobs] == [0, 1, 0, 0, 0]
    assert resumed[1] == 4
    assert latents(jobs) == hashes(config, list(range(5)))
    assert list((tmp_path / "latents").iterdir()) == []


def _has_restarted(service: Serving, times: int) -> bool:
    return service.engine.restarts == times


@pytest.mark.long
def test_a_clip_during_which_ranks_die_twice_fails_by_name(tmp_path: Path) -> None:
    config, told = dummy_config(2), list[str]()
    sink = logger.add(told.append, format="{message}", level="ERROR")
    with serving(tmp_path, config, stop=(0, 0, 1)) as service:
        ids = service.add(*range(4))
        for death in (1, 2):
            service.wait_for_step(ids[0], 1)
            service.kill(0)
            service.wait(partial(_has_restarted, service, death), "no restart")
        service.go_on()
        jobs = service.wait_final(ids)
    logger.remove(sink)
    assert any(f"was killed by SIGKILL at {ids[0]}, step" in line for line in told), told
    assert [job.state for job in jobs] == [JobState.FAILED] + [JobState.COMPLETED] * 3
    error = jobs[0].error
    assert error is not None
    assert error["type"] == "RankError"
    assert "died 2 times during this clip" in error["message"]
    assert "was killed by SIGKILL" in error["message"]
    assert latents(jobs[1:]) == hashes(config, [1, 2, 3])
    assert list((tmp_path / "latents").iterdir()) == []


def test_an_idle_rank_that_dies_blames_no_job(tmp_path: Path) -> None:
    with serving(tmp_path, dummy_config(2)) as service:
        service.wait_final(service.add(1))
        service.kill(0)
        service.wait(lambda: service.engine.restarts == 1, "no restart")
        assert service.wait_final(service.add(2))[0].attempts == 0
        assert service.engine.state == "ready"


@pytest.mark.long
def test_the_back_off_doubles_and_a_finished_clip_resets_it(tmp_path: Path) -> None:
    with serving(tmp_path, dummy_config(1), back_off=0.2) as service:
        for restarts in (1, 2):
            service.wait(lambda: service.engine.state == "ready", "not ready")
            service.kill(0)
            doubled = pytest.approx(0.4 * restarts)
            service.wait(lambda: service.engine._back_off == doubled, "it does not double")  # noqa: B023
            service.wait(lambda: service.engine.state == "ready", "not ready")
        service.wait_final(service.add(1))
        service.wait(lambda: service.engine._back_off == 0.2, "it is not reset")
        assert service.engine.restarts == 2


def test_a_cancelled_job_does_not_return_after_a_kill(tmp_path: Path) -> None:
    with serving(tmp_path, dummy_config(2), stop=(0, 0, 1)) as service:
        ids = service.add(0, 1)
        service.wait_for_step(ids[0], 1)
        service.store.ask_to_cancel(ids[0])
        service.kill(0)
        service.go_on()
        states = [job.state for job in service.wait_final(ids)]
    assert states == [JobState.CANCELLED, JobState.COMPLETED]


@pytest.mark.long
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
    assert latents(jobs) == hashes(config, [0, 1])


@pytest.mark.long
def test_photographs_become_clips_through_a_kill(tmp_path: Path) -> None:
    config = demo_config()
    jobs = [demo_job(tmp_path, seed) for seed in range(4)]
    (tmp_path / "photos" / jobs[2].photo).write_bytes(b"not an image")
    with serving(tmp_path, config, stop=(0, 1, 1)) as service:
        ids = service.store_jobs(*jobs)
        service.wait_for_step(ids[1], 1)
        service.kill(1)
        service.go_on()
        ended = service.wait_final(ids)
        assert service.engine.restarts == 1
    failed = ended.pop(2)
    assert failed.state is JobState.FAILED
    assert failed.error is not None
    assert failed.error["type"] == "InputError"
    with Pipeline(config.alone()) as pipeline:
        photo = str(tmp_path / "photos" / jobs[0].photo)
        requests = [ClipRequest(seed=seed, image=photo) for seed in (0, 1, 3)]
        expected = [result.metadata["latents_sha256"] for result in pipeline.run(requests)]
    assert latents(ended) == expected
    clips = {path.name for path in (tmp_path / "clips").iterdir()}
    assert clips == {f"{job.id}{suffix}" for job in ended for suffix in (".mp4", ".mp4.json")}
    assert list((tmp_path / "latents").iterdir()) == []


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What is logged as a warning or an error."""
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(line.strip()), format="{message}", level="WARNING")
    yield lines
    logger.remove(sink)


def test_a_full_disk_delays_a_result_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    monkeypatch.setattr("svdpp.serve.feeder._DISK_SECONDS", 0.01)
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


def test_a_queue_that_is_moved_away_delays_a_result_and_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    monkeypatch.setattr("svdpp.serve.feeder._DISK_SECONDS", 0.01)
    path, away = tmp_path / "queue.sqlite3", tmp_path / "away"
    with serving(tmp_path, dummy_config(1), stop=(0, 0, 1)) as service:
        complete, tries = service.store.complete, list[str]()

        def count(*arguments: Any) -> bool:
            tries.append(arguments[0])
            return complete(*arguments)

        monkeypatch.setattr(service.store, "complete", count)
        (id,) = service.add(1)
        service.wait_for_step(id, 1)
        path.rename(away)
        service.go_on()
        service.wait(lambda: len(tries) > 3, "it is not tried again")
        away.rename(path)
        assert service.wait_final([id])[0].state is JobState.COMPLETED
        service.wait(lambda: len(told) > 1, "nothing is said")
    assert [line.rpartition(": ")[2] for line in told] == [
        "no clip is begun or taken",
        "clips are made",
    ]


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
    monkeypatch.setattr("svdpp.serve.engine.find_world", lambda: World(**_ONE_RANK))
    with serving(tmp_path, config, stop=(0, 0, 2)) as service:
        (job_id,) = service.add(1)
        service.wait_for_step(job_id, 2)
        service.kill(0)
        service.wait(lambda: service.engine.fatal is not None, "it goes on")
        assert "SIGKILL" in str(service.engine.fatal)
        assert service.engine.live_ranks == 0
        assert service.job(job_id).state is JobState.QUEUED
    monkeypatch.undo()
    with serving(tmp_path, config) as service:
        assert service.wait_final([job_id])[0].state is JobState.COMPLETED


_ONE_RANK: dict[str, Any] = {"rank": 0, "local_rank": 0, "size": 1, "local_size": 1}
