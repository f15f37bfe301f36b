"""Jobs for tests, and service engines that run the jobs on real ranks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import RequestError
from svdpp.media.inputs import example_images
from svdpp.plan.costs import CostModel
from svdpp.serve.engine import Engine
from svdpp.serve.job import Job, JobState, new_id
from svdpp.serve.queue import JobQueue
from svdpp.serve.retention import remove_orphans
from tests.support.damage import Damage
from tests.support.dummies import HANG_SECONDS
from tests.support.processes import wait_until

STEPS = 8
SAMPLING = SvdSampling(num_inference_steps=STEPS, num_frames=2, decode_chunk_size=2)


def new_job(**values: Any) -> Job:
    id = values.pop("id", new_id())
    about = {
        "seed": 1,
        "sampling": SAMPLING,
        "input_file": f"{id}.png",
        "input_name": "cat.png",
        "input_sha256": "0" * 64,
        "created_at": 1000.0,
        **values,
    }
    return Job(id=id, **about)


def add(store: JobQueue, **values: Any) -> str:
    """Add a new job to a job queue, and return its id."""
    return store.add(new_job(**values), max_open=None).id


def job_of(store: JobQueue, id: str) -> Job:
    """Return the job of a queue that has an id. Fail the test if there is none."""
    job = store.get(id)
    assert job is not None
    return job


def taken(store: JobQueue) -> Job:
    """Claim the next job of a queue. Fail the test if there is none."""
    job = store.claim()
    assert job is not None
    return job


def in_state(store: JobQueue, state: JobState, **values: Any) -> str:
    """Add a new job to a queue, bring the job into a state, and return its id."""
    id = add(store, **values)
    token = 0 if state is JobState.QUEUED else taken(store).fencing_token
    match state:
        case JobState.COMPLETED:
            store.complete(id, {}, token)
        case JobState.FAILED:
            store.fail(id, RequestError("no"), token)
        case JobState.CANCELLED:
            store.mark_cancelled(id, token)
    assert job_of(store, id).state is state
    return id


def take_all(store: JobQueue) -> list[str]:
    """Claim all queued jobs of a queue, and return their ids in the order of the claims."""
    return [job.id for job in iter(store.claim, None)]


def remove_leftovers_now(store: JobQueue, in_use: Collection[str] = ()) -> None:
    """Remove a service's files that no job needs. A server removes them at most two hours later."""
    remove_orphans(store, remove_orphans(store, set(), in_use), in_use)


def dummy_config(world_size: int = 2, step_seconds: float = 0.0, **changes: Any) -> PipelineConfig:
    """Return a configuration of the dummy model, whose steps sleep for `step_seconds`.

    With 0 seconds, the dummy model neither sleeps nor decodes.
    """
    model = ModelConfig(
        name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8), dummy_sleeps=step_seconds > 0
    )
    config = PipelineConfig(
        world_size=world_size,
        model=model,
        sampling=SAMPLING,
        costs=CostModel(step_seconds=step_seconds or 0.001),
    )
    return replace(config, **changes)


def dummy_job(seed: int, **values: Any) -> Job:
    about = {"sampling": SAMPLING, "input_file": "none.png", "created_at": time.time(), **values}
    return new_job(seed=seed, **about)


@dataclass
class Serving:
    """Running service engine of a test, with its job queue and its data folder."""

    store: JobQueue
    engine: Engine
    ended: list[Job]
    folder: Path

    def add(self, *seeds: int, **values: Any) -> list[str]:
        """Add a job for each seed to the engine's queue, and return their ids."""
        return self.store_jobs(*(dummy_job(seed, **values) for seed in seeds))

    def store_jobs(self, *jobs: Job) -> list[str]:
        """Add jobs to the engine's queue, wake the engine, and return their ids."""
        for job in jobs:
            self.store.add(job, max_open=None)
        self.engine.dispatcher.wake()
        return [job.id for job in jobs]

    def made(self, *jobs: Job) -> list[Job]:
        """Add jobs, wait until the engine has ended them, and return them in their final states."""
        return self.wait_final(self.store_jobs(*jobs))

    def job(self, job_id: str) -> Job:
        return job_of(self.store, job_id)

    def states(self, ids: list[str]) -> list[JobState]:
        return [self.job(job_id).state for job_id in ids]

    def wait_final(self, ids: list[str]) -> list[Job]:
        self.wait(lambda: all(state.is_final for state in self.states(ids)), "jobs do not end")
        return [self.job(job_id) for job_id in ids]

    def wait(self, happens: Callable[[], object], what: str) -> None:
        wait_until(happens, HANG_SECONDS, lambda: f"{what}: {self.engine.rank_monitor.snapshot()}")

    def wait_for_step(self, job_id: str, step: int) -> None:
        """Wait until a clip has finished `step` steps, where `serving` pauses the clip."""

        def is_there() -> bool:
            clip = self.engine.dispatcher.get(job_id)
            assert not self.job(job_id).state.is_final, "it did not stop"
            return clip is not None and clip.progress.steps_done >= step

        self.wait(is_there, f"no step {step}")

    def go_on(self) -> None:
        """Continue the clip that `serving` has stopped at a step."""
        (self.folder / "gate").touch()

    @property
    def pids(self) -> list[int]:
        pipeline = self.engine._pipeline
        assert pipeline is not None
        return pipeline.rank_pids

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)


@contextlib.contextmanager
def serving(
    folder: Path,
    config: PipelineConfig,
    *,
    grace: float = 60,
    stop: tuple[int, int, int] | None = None,
    observer: Callable[..., object] | None = None,
    url: str | None = None,
) -> Iterator[Serving]:
    """Yield a service engine with real ranks and its data in `folder`; close it after the block.

    `stop` is a rank, the index of a clip, and a step of that clip. The rank waits before this step
    until `go_on` is called.
    """
    ended: list[Job] = []
    store = JobQueue(folder, adopts=True, url=url)

    def note(job: Job) -> None:
        if job.state.is_final:
            ended.append(job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("svdpp.serve.engine._MIN_BACK_OFF", 0.05)
        if stop is not None:
            rank, clip, step = stop
            gate = str(folder / "gate")
            fault = Damage("hang", rank, clip, place=f"step{step}", until=gate)
            patch.setattr("svdpp.serve.engine.Pipeline", partial(Pipeline, fault=fault))
        engine = Engine(config, store, on_changed=note)
        if observer is not None:
            engine.observe(observer)
        store.requeue_expired()
        engine.start()
        try:
            yield Serving(store, engine, ended, folder)
        finally:
            engine.close(grace)
            store.close()


def latents(jobs: list[Job]) -> list[str]:
    return [job.metadata["latents_sha256"] for job in jobs]


DEMO_SAMPLING = replace(
    SAMPLING, num_inference_steps=4, height=64, width=64, max_guidance_scale=1.1
)


def demo_config(world_size: int = 2) -> PipelineConfig:
    return PipelineConfig(
        world_size=world_size, model=ModelConfig(name="demo"), sampling=DEMO_SAMPLING
    )


def demo_job(folder: Path, seed: int, photo: Path | None = None) -> Job:
    """Copy an image to a service's data folder, and return a job of the demo model for it."""
    content = (photo or example_images()[0]).read_bytes()
    job_id = new_id()
    (folder / "photos").mkdir(exist_ok=True)
    (folder / "photos" / f"{job_id}.jpg").write_bytes(content)
    return dummy_job(
        seed,
        id=job_id,
        sampling=DEMO_SAMPLING,
        input_file=f"{job_id}.jpg",
        input_name="photo.jpg",
        input_sha256=hashlib.sha256(content).hexdigest(),
    )
