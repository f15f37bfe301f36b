"""A queue outlives its server's model: each clip is made by the model that it was requested of."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from svdpp.config import ModelConfig, PipelineConfig, WanSampling
from svdpp.serve.admission import Admission
from svdpp.serve.capabilities import Capabilities
from svdpp.serve.job import JobState
from svdpp.serve.queue import JobQueue, QueueFullError
from svdpp.serve.server import hold as hold_jobs
from tests.serve.http_server import DEMO, QUICK, HttpServer
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
    queued = [store.counts(with_held=held)[JobState.QUEUED] for held in (False, True)]
    assert queued == [1, 2]
    assert take_all(store) == [own]
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


@pytest.mark.parametrize("version", [1, 2])
def test_a_queue_of_an_earlier_svdpp_is_brought_up_to_date(tmp_path: Path, version: int) -> None:
    """Its open jobs are of the first model of their family that is served."""
    with contextlib.closing(JobQueue(tmp_path)) as store:
        done = [add(store) for _ in range(3)]
        models = ("/models/svd", "f" * 64, None), ("org/svd", None, "c0ffee"), ("demo", None, None)
        for model, fingerprint, revision in models:
            about = {"model": model, "weights_fingerprint": fingerprint, "revision": revision}
            job = store.take_next()
            assert job is not None
            store.complete(job.id, about)
        old, of_wan = new_job(), new_job(sampling=WanSampling(num_frames=5), prompt="the sea")
        for job in (old, of_wan):
            store.add(replace(job, prompt=None), max_open=None)
    _write_as(tmp_path / "queue.sqlite3", version)

    with contextlib.closing(JobQueue(tmp_path)) as store:
        made = [job for id in done if (job := store.get(id))]
        assert [job.model for job in made] == ["svd", "org/svd", "demo"]
        assert [job.weights for job in made] == ["f" * 64, "c0ffee", ""]
        assert store.get(old.id) == old
        hold(store, "svd", "e" * 64)
        assert store.get(old.id) == replace(old, model="svd", weights="e" * 64)
        assert list(held(store)) == [of_wan.id]
        new = new_job(prompt="the sea", negative_prompt="fog")
        store.add(new, max_open=None)
    with contextlib.closing(JobQueue(tmp_path)) as store:  # now there is nothing to change
        assert store.get(new.id) == new


@pytest.mark.parametrize("version", [3, 4])
def test_a_column_of_an_earlier_svdpp_is_left_behind(tmp_path: Path, version: int) -> None:
    with contextlib.closing(JobQueue(tmp_path)) as store:
        job = new_job(model="demo")
        store.add(job, max_open=None)
    _write_as(tmp_path / "queue.sqlite3", version)
    with contextlib.closing(JobQueue(tmp_path)) as store:
        assert store.get(job.id) == job
        store.add(new_job(), max_open=None)


def _write_as(path: Path, version: int) -> None:
    """Changes a queue to what an earlier version wrote."""
    new = {
        1: ("prompt", "negative_prompt"),
        2: ("model", "weights", "held", "proof_reason"),
        4: ("photo_pixels",),
    }
    with sqlite3.connect(path) as database:
        for column in (
            column for since, names in new.items() if since >= version for column in names
        ):
            database.execute(f"ALTER TABLE jobs DROP COLUMN {column}")
        if version < 4:
            database.execute("ALTER TABLE jobs ADD COLUMN wants_draft INTEGER NOT NULL DEFAULT 1")
        database.execute(f"PRAGMA user_version = {version}")
    database.close()


@pytest.mark.processes
def test_clips_wait_for_a_server_that_can_make_them(tmp_path: Path) -> None:
    with HttpServer(tmp_path / "data", *QUICK) as server:
        server.wait_ready()
        (done,) = server.add()
        server.wait_for(done, "completed")
        ids = server.add(3, steps=400)
        server.stop(SIGKILL)

    with HttpServer(tmp_path / "data", *DEMO) as server:
        server.wait_ready()
        assert "queued clips that wait for another start: 3, because its" in server.err
        listed = server.client.get("/v1/videos?order=asc&status=queued").json()["data"]
        assert [video["id"] for video in listed] == ids
        for video in (*listed, server.video(done)):
            assert video["model"] == "dummy"
        assert listed[0]["held"] == "its model is dummy, and this server runs demo"
        (own,) = server.add(frames=2, size="128x128")
        assert server.wait_for(own, "completed")["model"] == "demo"
        assert server.client.post(f"/v1/videos/{ids[2]}/cancel").json()["status"] == "cancelled"

    with HttpServer(tmp_path / "data", *QUICK) as server:
        assert server.video(own)["model"] == "demo"
        for id in ids[:2]:
            assert server.wait_for(id, "completed")["held"] is None
