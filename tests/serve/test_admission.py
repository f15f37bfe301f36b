"""What the ranks cannot make is refused before it is stored, or waits for a server that can."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling, sampling_defaults
from svdpp.driver import resolve as memory
from svdpp.driver.resolve import resolve
from svdpp.errors import OutOfMemoryError, RequestError
from svdpp.plan.costs import PRESETS
from svdpp.serve.clips import Admission
from svdpp.serve.queue import JobQueue, QueueFullError
from svdpp.serve.server import build
from svdpp.serve.service import ServerSettings, Service
from svdpp.serve.views import as_api_error
from tests.serve.engines import dummy_config
from tests.serve.store_jobs import SAMPLING as STORED
from tests.serve.store_jobs import add, job_of, new_job, take_all

DUMMY = ModelConfig(name="dummy", dummy_sleeps=True)
SAMPLING = SvdSampling(num_frames=2, decode_chunk_size=2)
COSTS = PRESETS["svd-xt-a100"]


def test_steps_that_need_a_rank_without_weights() -> None:
    sampling = replace(SAMPLING, num_inference_steps=2)
    config = PipelineConfig(
        world_size=4, model=DUMMY, sampling=sampling, split="alternating", costs=COSTS
    )
    with pytest.raises(RequestError, match="started with --steps 2") as caught:
        Admission(config, None).check(replace(sampling, num_inference_steps=25))
    error = as_api_error(caught.value)
    assert error.hint == "use 2 steps"
    assert error.details == {"field": "steps"}
    config = replace(config, sampling=replace(sampling, num_inference_steps=25))
    Admission(config, None).check(replace(sampling, num_inference_steps=25))


@pytest.mark.long
def test_a_clip_that_is_larger_than_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config, checkpoint = resolve(
        PipelineConfig(
            world_size=2,
            model=ModelConfig(name="demo"),
            sampling=SvdSampling(**sampling_defaults("demo")),
            split="alternating",
            costs=COSTS,
        )
    )
    gate = Admission(config, checkpoint)
    large = replace(config.sampling, num_frames=1024, decode_chunk_size=1024)
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**30)
    with pytest.raises(OutOfMemoryError, match="out of memory before the run"):
        gate.check(large)
    # The ranks hold their own size already, however little is left.
    gate.check(config.sampling)
    gate.check(replace(config.sampling, num_inference_steps=3, num_frames=2, decode_chunk_size=2))
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**50)
    gate.check(large)


def served(folder: Path, world_size: int = 2) -> Service:
    """A server of the dummy model, which is not started."""
    config = dummy_config(world_size)
    settings = ServerSettings(config=config, folder=folder, sizes=((64, 64),), max_open=9)
    return build(settings, None)[1]


def test_what_is_held_says_why(tmp_path: Path) -> None:
    """Weights count, and so do steps that the ranks cannot divide."""
    with closing(JobQueue(tmp_path)) as queue:
        add(queue, model="dummy")
        other, newer = add(queue, model="b"), add(queue, model="dummy", weights="2" * 64)
        odd = add(queue, model="dummy", sampling=replace(STORED, num_inference_steps=6))
    why: dict[str, str | None] = {
        other: "its model is b, and this server runs dummy",
        newer: "its model is dummy, and this server runs other weights of it",
        odd: None,
    }
    service = served(tmp_path)
    with closing(service.queue) as queue:
        assert {id: service.video(job_of(queue, id)).held for id in why} == why
    service = served(tmp_path, world_size=4)
    with closing(service.queue) as queue:
        assert "6" in (service.video(job_of(queue, odd)).held or "")
        assert odd not in take_all(queue)
    with closing(served(tmp_path).queue) as queue:
        assert odd in take_all(queue)


def test_held_jobs_take_no_place_and_can_be_cancelled(store: JobQueue) -> None:
    id = add(store, model="b", created_at=1.0)
    store.kind = "a"
    assert store.oldest_waiting() is None
    store.add(new_job(model="a", created_at=2.0), max_open=1, max_open_of_owner=1)
    with pytest.raises(QueueFullError):
        store.add(new_job(model="a"), max_open=1)
    assert store.oldest_waiting() == 2.0
    assert store.cancel_waiting(id)
