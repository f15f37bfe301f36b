"""A queue outlives its server's model: each clip is made by the model that it was requested of."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.serve.clips import Admission
from svdpp.serve.form import Capabilities
from svdpp.serve.job import JobState
from svdpp.serve.queue import JobQueue, QueueFullError
from svdpp.serve.server import hold as hold_jobs
from tests.serve.http_server import QUICK, HttpServer
from tests.serve.store_jobs import SAMPLING, add, new_job, take_all


def hold(store: JobQueue, model: str, weights: str = "", **config: Any) -> None:
    """As at the start of a server."""
    capabilities = Capabilities(model=model, weights=weights, sampling=SAMPLING, sizes=())
    dummy = ModelConfig(name="dummy", dummy_sleeps=True)
    pipeline = PipelineConfig(model=dummy, sampling=SAMPLING, **{"world_size": 1, **config})
    hold_jobs(store, capabilities, Admission(pipeline, None))


def held(store: JobQueue) -> dict[str, str]:
    jobs = store.page(owner=None, limit=100, order="asc")
    return {job.id: job.held for job in jobs if job.held is not None}


def test_only_jobs_of_the_servers_model_are_taken(store: JobQueue) -> None:
    own, other = add(store, model="a"), add(store, model="b")
    hold(store, "a")
    assert held(store) == {other: "its model is b, and this server runs a"}
    assert [id for id, _ in store.waiting()] == [own]
    assert store.num_open() == 1
    assert store.counts()[JobState.QUEUED] == 1
    assert take_all(store) == [own]
    assert store.complete(own, {})
    assert store.num_open() == 0
    assert store.has_unfinished()
    hold(store, "b")
    assert held(store) == {}
    assert take_all(store) == [other]


def test_weights_count_and_not_the_name_of_their_folder(store: JobQueue) -> None:
    first, second = (add(store, model="wan", weights=weights) for weights in ("1" * 64, "2" * 64))
    hold(store, "renamed", "1" * 64)
    assert held(store) == {second: "its model is wan, and this server runs renamed"}
    hold(store, "wan", "2" * 64)
    assert held(store) == {first: "its model is wan, and this server runs other weights of it"}


def test_jobs_with_steps_that_the_ranks_cannot_make_wait(store: JobQueue) -> None:
    id = add(store, model="a", sampling=replace(SAMPLING, num_inference_steps=6))
    hold(store, "a", world_size=4)
    assert "6" in held(store)[id]
    hold(store, "a", world_size=2)
    assert take_all(store) == [id]


def test_held_jobs_take_no_place_and_can_be_cancelled(store: JobQueue) -> None:
    id = add(store, model="b", created_at=1.0)
    hold(store, "a")
    assert store.oldest_waiting() is None
    store.add(new_job(model="a", created_at=2.0), max_open=1, max_open_of_owner=1)
    with pytest.raises(QueueFullError):
        store.add(new_job(model="a"), max_open=1)
    assert store.oldest_waiting() == 2.0
    assert store.cancel_waiting(id)


@pytest.mark.processes
def test_clips_wait_for_a_server_that_can_make_them(tmp_path: Path) -> None:
    sampling = SvdSampling(num_inference_steps=2, num_frames=14, decode_chunk_size=14)
    with closing(JobQueue(tmp_path / "data")) as queue:
        own, *others = (
            add(queue, model=model, sampling=sampling) for model in ("dummy", *3 * ["demo"])
        )
    with HttpServer(tmp_path / "data", *QUICK) as server:
        assert server.wait_for(own, "completed")["held"] is None
        assert "queued clips that wait for another start: 3, because its" in server.err
        listed = server.client.get("/v1/videos?order=asc&status=queued").json()["data"]
        assert [video["id"] for video in listed] == others
        for video in listed:
            assert video["model"] == "demo"
            assert video["held"] == "its model is demo, and this server runs dummy"
        assert server.client.post(f"/v1/videos/{others[2]}/cancel").json()["status"] == "cancelled"
    with closing(JobQueue(tmp_path / "data")) as queue:
        hold(queue, "demo")
        assert take_all(queue) == others[:2]
