"""Real servers over one PostgreSQL: each clip is made once, whichever server or database goes."""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.serve.fleet import Fleet
from svdpp.serve.form import Capabilities
from svdpp.serve.job import Job, JobState
from svdpp.serve.queue import JobQueue
from svdpp.serve.store import remove_leftovers
from tests.serve.engines import Serving, demo_config, demo_job, serving
from tests.serve.http_server import DEMO, DUMMY, HANG_SECONDS, HttpServer, error_of, stream, wait
from tests.serve.postgres import Postgres
from tests.serve.test_crashes import wait_made
from tests.soak.fleet_soak import soak
from tests.soak.serve_checks import remove_leftovers_now

pytest.importorskip("fastapi")
pytestmark = [pytest.mark.processes, pytest.mark.long]

Start = Callable[..., HttpServer]
_STEPS = 40
_SLEEPING = (*DUMMY, "--time-scale", "0.02")
_SLOW = (*DUMMY, "--time-scale", "0.4")
_SHORT = ("--lease", "3")


def _request(server: HttpServer, seed: int, **form: Any) -> str:
    return server.add(seed=seed, steps=_STEPS, **form)[0]


def _servers(server: HttpServer) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = server.client.get("/v1/servers").json()["data"]
    return listed


def _begun(server: HttpServer, seed: int, step: int = 1) -> str:
    """A clip that a server has begun."""
    id = _request(server, seed)
    wait(lambda: server.video(id)["step"] >= step, lambda: f"{server.video(id)}")
    return id


def _begun_by(
    first: HttpServer, second: HttpServer, seed: int, step: int = 1
) -> tuple[HttpServer, HttpServer, str]:
    """Which server makes a new clip, the other one, and the clip after some steps."""
    id = _request(first, seed)
    wait(lambda: any(_servers(server)[0]["claims"] for server in (first, second)))
    if not _servers(first)[0]["claims"]:
        first, second = second, first
    wait(lambda: first.video(id)["step"] >= step, lambda: f"{first.video(id)}")
    return first, second, id


def test_servers_share_the_work(start: Start) -> None:
    first, second = start(*_SLEEPING), start(*_SLEEPING)
    ids = {_request((first, second)[seed % 2], seed): seed for seed in range(12)}
    again = _request(first, 90, key="k")
    assert _request(second, 90, key="k") == again
    wait_made(second, {**ids, again: 90})
    assert set(first.all_ids()) == {*ids, again}
    wait(lambda: len(_servers(first)) == 2 == len(_servers(second)))
    own, other = _servers(first)
    assert own["id"] == _servers(second)[1]["id"] != other["id"]
    assert (own["model"], own["ranks"], own["is_live"]) == ("dummy", 2, True)
    for name in ("host", "version", "model", "weights", "sizes", "ranks", "is_live"):
        assert other[name] == own[name]
    metrics = first.client.get("/metrics").text
    assert f'svdpp_server_ranks{{server="{other["id"]}"}} 2.0' in metrics
    for server in (first, second):
        made = server.client.get("/metrics").text
        assert 'svdpp_clips_total{state="completed"} 0.0' not in made


@pytest.mark.full  # `test_store` has the same with a bucket
def test_another_server_goes_on_with_the_clip_of_a_killed_one(start: Start) -> None:
    servers = [start(*_SLOW, *_SHORT) for _ in range(2)]
    first, second, id = _begun_by(*servers, 5, step=_STEPS - 10)
    first.stop(signal.SIGKILL)
    wait_made(second, {id: 5})
    metadata = second.client.get(f"/v1/videos/{id}/metadata").json()
    assert metadata["resumed_from_step"] > 0  # it had a latent checkpoint


def test_a_leaving_server_hands_back_what_it_has_not_finished(start: Start) -> None:
    """Without a lease's end, which is later than this test's."""
    servers = [start(*_SLOW, "--grace", "0", "--lease", "3000") for _ in range(2)]
    first, second, id = _begun_by(*servers, 6)
    assert first.stop() == 0
    wait_made(second, {id: 6})
    wait(lambda: len(_servers(second)) == 1)


def test_a_clip_is_cancelled_at_any_server(start: Start) -> None:
    first, second, id = _begun_by(start(*_SLOW), start(*_SLOW), 7)
    assert second.video(id)["status"] == "in_progress"
    assert second.client.post(f"/v1/videos/{id}/cancel").json()["status"] == "cancelled"
    assert first.client.delete(f"/v1/videos/{id}").json()["deleted"]
    assert second.client.get(f"/v1/videos/{id}").status_code == 404


def test_a_stopped_server_publishes_nothing(start: Start, tmp_path: Path, database: str) -> None:
    options = (*DEMO, "--steps", "12", *_SHORT)
    first = start(*options)
    (id,) = first.add(seed=1)
    wait(lambda: first.video(id)["step"] >= 1, lambda: f"{first.video(id)}")
    os.kill(first.process.pid, signal.SIGSTOP)
    try:
        second = start(*options)
        second.wait_for(id, "completed")
    finally:
        os.kill(first.process.pid, signal.SIGCONT)
    made = second.client.get(f"/v1/videos/{id}/content").content
    wait(lambda: not _servers(first)[0]["claims"])
    remove_leftovers_now(tmp_path / "data", database)
    clips = {path.name for path in (tmp_path / "data" / "clips").iterdir()}
    assert clips == {f"{id}-2.mp4", f"{id}-2.mp4.json"}
    assert first.client.get(f"/v1/videos/{id}/content").content == made
    (alone,) = first.add(seed=1)
    first.wait_for(alone, "completed")
    frames = [
        first.client.get(f"/v1/videos/{each}/metadata").json()["frames_sha256"]
        for each in (id, alone)
    ]
    assert frames[0] == frames[1]


def _lapsed(own: Serving) -> Job:
    """A clip at its second step, whose claim nobody renews."""
    job = demo_job(own.folder, 1)
    own.store.lease_seconds = 0.1
    own.store_jobs(job)
    own.wait_for_step(job.id, 2)
    return job


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_clip_that_another_server_has_taken_is_not_published(
    tmp_path: Path, database: str, is_noticed: bool
) -> None:
    """Neither if the server knows that it has lost the claim, nor if it learns so at the end."""
    with (
        serving(tmp_path, demo_config(), url=database, stop=(1, 0, 2)) as own,
        closing(JobQueue(tmp_path, url=database, lease_seconds=0.1)) as other,
    ):
        job = _lapsed(own)
        wait(lambda: other.recover())
        taken = other.take_next()
        assert taken is not None
        if is_noticed:
            own.engine.feeder.lose(own.store.renew(own.engine.feeder.steps_done)[0])
        own.go_on()
        own.wait(lambda: not own.engine.feeder.clips(), "the clip stays")
        now = own.job(job.id)
        assert (now.state, now.token, now.server) == (JobState.IN_PROGRESS, 2, other.server)
        remove_leftovers(other, remove_leftovers(other, set()))
        assert list((tmp_path / "clips").glob("*.mp4*")) == []
        assert other.complete(job.id, {"own": True}, 2)


def test_a_server_does_not_make_a_clip_twice_at_once(tmp_path: Path, database: str) -> None:
    """Its claim ends, and it takes the same job again before it knows."""
    with (
        serving(tmp_path, demo_config(), url=database, stop=(1, 0, 2)) as own,
        closing(JobQueue(tmp_path, url=database, lease_seconds=0.1)) as other,
    ):
        job = _lapsed(own)
        own.store.lease_seconds = 3000.0
        wait(lambda: other.recover())
        own.engine.feeder.wake()
        own.wait(lambda: own.engine.feeder.clips()[0].is_lost, "it is not noticed")
        own.go_on()
        (done,) = own.wait_final([job.id])
        assert done.state is JobState.COMPLETED
        remove_leftovers(other, remove_leftovers(other, set()))
        clips = {path.name for path in (tmp_path / "clips").glob("*.mp4*")}
        assert clips == {f"{job.id}-{done.token}.mp4", f"{job.id}-{done.token}.mp4.json"}
        assert done.token > 2


@pytest.mark.parametrize(("kind", "fewest", "most"), [("demo", 1, 40), ("another", 200, 200)])
def test_a_new_job_wakes_few_servers_of_a_large_fleet(
    tmp_path: Path, database: str, kind: str, fewest: int, most: int
) -> None:
    """16 of 640 that make the same clips; others do not count."""
    with serving(tmp_path, demo_config(), url=database) as own:
        own.store.kind = "demo"  # so it takes none of them
        demo = Capabilities(model="demo", sampling=own.engine.config.sampling, sizes=())
        fleet = Fleet(own.store, own.engine, demo)
        others = [replace(fleet.servers()[0], id=str(n), model=kind, free=1) for n in range(640)]
        fleet._others = others
        wake, woken = own.engine.feeder.wake, []
        own.engine.feeder.wake = lambda: woken.append(wake())  # type: ignore[func-returns-value]
        random.seed(0)
        with closing(JobQueue(tmp_path, url=database)) as other:
            other.database.listen(0.0)
            own.store.database.listen(0.0)
            for seed in range(200):
                other.add(replace(demo_job(tmp_path, seed), model="away"), max_open=None)
                fleet._listen(HANG_SECONDS)
        assert fewest <= len(woken) <= most


def test_clips_survive_the_database(start: Start, postgres: Postgres) -> None:
    """What is in progress is finished; new requests are told to come back."""
    server = start(*_SLEEPING)
    ids = {(begun := _begun(server, 8)): 8, _request(server, 9): 9}
    with stream(server, begun) as events:
        next(events)
        postgres.stop()
        try:
            for _ in range(3):
                answer = server.request(seed=1)
                error_of(answer, 503, "storage_failed")
                assert int(answer.headers["Retry-After"]) > 0
            assert server.client.get("/ready").status_code == 503
            assert server.client.get("/health").status_code == 200
            wait(lambda: "does not answer" in server.err)
        finally:
            postgres.start()
        assert [event["status"] for event in events][-1] == "completed"
    server.wait_ready()
    wait_made(server, {**ids, _request(server, 10): 10})
    wait(lambda: "the queue is back" in server.err)
    assert server.err.count("does not answer") == 1
    assert "Traceback" not in server.err


def test_an_upload_that_the_database_interrupts_is_answered(
    start: Start, tmp_path: Path, postgres: Postgres, database: str
) -> None:
    """And leaves no file of a job that is not stored, an hour later."""
    server = start(*_SLEEPING, *_SHORT)
    is_over, answers = threading.Event(), []

    def upload() -> None:
        while not is_over.is_set():
            answers.append(server.request(seed=1))

    with ThreadPoolExecutor(4) as clients:
        uploads = [clients.submit(upload) for _ in range(4)]
        try:
            for _ in range(3):
                made = len(answers) + 8
                wait(lambda made=made: len(answers) > made)  # type: ignore[misc]
                postgres.stop()
                postgres.start()
        finally:
            is_over.set()
        for each in uploads:
            each.result()
    server.wait_ready()
    for answer in answers:
        assert answer.status_code == 202 or int(answer.headers["Retry-After"]) > 0
    remove_leftovers_now(tmp_path / "data", database)
    photos = (tmp_path / "data" / "photos").iterdir()
    assert {path.stem for path in photos} <= set(server.all_ids())


def test_a_short_soak(tmp_path: Path) -> None:
    summary = soak(tmp_path, argparse.Namespace(jobs=12, clients=6, faults=4, seed=1))
    assert summary["wrong"] == {}, summary["faults"]
