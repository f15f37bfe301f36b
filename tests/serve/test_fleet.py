"""Real servers, single and with a shared PostgreSQL, make each clip once despite kills and outages.

`tools/soak/serve_soak.py` tests the same for minutes, with faults at random times.
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from svdpp.serve.job import JobState
from svdpp.serve.queue import JobQueue
from svdpp.serve.sqlite import RESERVE_FILE
from tests.support.backends import Postgres
from tests.support.dummies import plain_hashes
from tests.support.engines import (
    Serving,
    demo_config,
    demo_job,
    remove_leftovers_now,
    serving,
    taken,
)
from tests.support.http_server import QUICK, HttpServer, error_of, wait
from tests.support.processes import MARK
from tools.soak.serve_server import fork_server_of, processes_of, ranks_of
from tools.soak.serve_soak import soak

pytestmark = pytest.mark.slow

Pair = tuple[HttpServer, HttpServer]
_SEEDS = (3, 1, 4)


def _servers(server: HttpServer) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = server.client.get("/v1/servers").json()["data"]
    return listed


def wait_made(server: HttpServer, ids: dict[str, int]) -> None:
    """Wait until a server has completed clips, and compare the clips' latents with a plain loop's.

    `ids` maps each clip's id to the clip's seed.
    """
    for id, seed in ids.items():
        server.wait_for(id, "completed")
        metadata = server.client.get(f"/v1/videos/{id}/metadata").json()
        assert [metadata["latents_sha256"]] == plain_hashes(server.video(id)["steps"], seed)


def _begin_one_clip(pair: Pair, **form: Any) -> tuple[HttpServer, HttpServer, str]:
    """Request a clip from a pair of servers; return its maker, the other server, and the clip's id.

    The clip has finished at least one step.
    """

    def makers() -> list[HttpServer]:
        return [server for server in pair if _servers(server)[0]["claims"]]

    wait(lambda: not makers())
    (id,) = pair[0].add(**form)
    wait(makers)
    maker, other = pair if makers() == [pair[0]] else reversed(pair)
    wait(lambda: maker.video(id)["step"] >= 1, lambda: f"{maker.video(id)}")
    return maker, other, id


def test_two_servers_share_a_queue_outlive_its_database_and_one_of_them_leaves(
    start: Callable[..., HttpServer], tmp_path: Path, postgres: Postgres, database: str
) -> None:
    options = (*QUICK, "--grace", "0", "--lease", "6")
    pair = start(*options), start(*options)
    _share_the_work(*pair)
    _a_clip_is_cancelled_at_any_server(pair)
    _clips_survive_the_database(pair, postgres)
    _an_upload_that_the_database_interrupts_is_answered(pair[0], tmp_path, postgres, database)
    _a_leaving_server_hands_back_what_it_has_not_finished(pair)


def _share_the_work(first: HttpServer, second: HttpServer) -> None:
    ids = {(first, second)[seed % 2].add(seed=seed)[0]: seed for seed in range(12)}
    (again,) = first.add(seed=90, key="k")
    assert second.add(seed=90, key="k") == [again]
    wait_made(second, {**ids, again: 90})
    assert set(first.all_ids()) == {*ids, again}
    wait(lambda: len(_servers(first)) == 2 == len(_servers(second)))
    own, other = _servers(first)
    assert own["id"] == _servers(second)[1]["id"] != other["id"]
    for server in (own, other):
        assert (server["model"], server["ranks"], server["is_live"]) == ("dummy", 2, True)
    metrics = first.client.get("/metrics").text
    assert f'svdpp_server_ranks{{server="{other["id"]}"}} 2.0' in metrics
    for server in (first, second):
        made = server.client.get("/metrics").text
        assert 'svdpp_clips_total{state="completed"} 0.0' not in made


def _a_clip_is_cancelled_at_any_server(pair: Pair) -> None:
    maker, other, id = _begin_one_clip(pair, steps=1000)
    assert other.video(id)["status"] == "in_progress"
    answer = other.client.post(f"/v1/videos/{id}/cancel").json()
    assert answer["cancel_requested"] or answer["status"] == "cancelled", answer
    other.wait_for(id, "cancelled")
    assert maker.client.delete(f"/v1/videos/{id}").json()["deleted"]
    assert other.client.get(f"/v1/videos/{id}").status_code == 404


def _clips_survive_the_database(pair: Pair, postgres: Postgres) -> None:
    """Check that clips in progress survive an outage of the database; new ones get status 503."""
    maker, other, begun = _begin_one_clip(pair, seed=8, steps=300)
    ids = {begun: 8, maker.add(seed=9)[0]: 9}
    with maker.events(begun) as events:
        next(events)
        postgres.stop()
        try:
            for _ in range(3):
                answer = maker.request(seed=1)
                error_of(answer, 503, "storage_failed")
                assert int(answer.headers["Retry-After"]) > 0
            assert maker.client.get("/ready").status_code == 503
            assert maker.client.get("/health").status_code == 200
            for server in pair:
                wait(lambda server=server: "does not answer" in server.err)  # type: ignore[misc]
        finally:
            postgres.start()
        assert [event["status"] for event in events][-1] == "completed"
    maker.wait_ready()
    wait_made(other, {**ids, maker.add(seed=10)[0]: 10})
    for server in pair:
        wait(lambda server=server: "the queue is available again" in server.err)  # type: ignore[misc]
        assert server.err.count("does not answer") == 1
        assert "Traceback" not in server.err


def _an_upload_that_the_database_interrupts_is_answered(
    server: HttpServer, folder: Path, postgres: Postgres, database: str
) -> None:
    """Check that a request during a restart of the database gets a response.

    If the request's job is not stored, the uploaded files are removed at most two hours later.
    """
    with ThreadPoolExecutor(4) as clients:
        for _ in range(3):
            answers = [clients.submit(server.request, seed=1) for _ in range(24)]
            wait(answers[7].done)
            postgres.stop()
            postgres.start()
            for answer in (each.result() for each in answers):
                assert answer.status_code == 202 or int(answer.headers["Retry-After"]) > 0
    server.wait_ready()
    with closing(JobQueue(folder / "data", url=database)) as queue:
        remove_leftovers_now(queue)
    photos = (folder / "data" / "photos").iterdir()
    assert {path.stem for path in photos} <= set(server.all_ids())
    wait(lambda: not server.client.get("/v1/videos?status=queued").json()["data"])


def _a_leaving_server_hands_back_what_it_has_not_finished(pair: Pair) -> None:
    """Check that a server that shuts down requeues its clip at once, before the lease expires."""
    leaving, other, id = _begin_one_clip(pair, seed=6, steps=300)
    assert leaving.stop() == 0
    wait_made(other, {id: 6})
    assert f"{id} is queued: its server did not renew" not in other.err
    wait(lambda: len(_servers(other)) == 1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Data folder of servers. After the test, check that they left no process or temporary file."""
    temporary, data = tmp_path / "t", tmp_path / "data"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv(MARK, str(tmp_path))
    yield data
    wait(lambda: not processes_of(str(tmp_path), data), lambda: "processes are left")
    assert list(temporary.iterdir()) == []
    found = {str(path.relative_to(data)) for path in data.rglob("*") if path.is_file()}
    with closing(sqlite3.connect(data / "queue.sqlite3")) as database:
        photos = {f"photos/{name}" for (name,) in database.execute("SELECT photo FROM jobs")}
    assert found == {"lock", "queue.sqlite3", RESERVE_FILE, *photos}


def _request_three(server: HttpServer, request: str) -> list[str]:
    """Request three clips from a server with idempotency keys, and return the clips' ids."""
    return [server.add(seed=seed, steps=40, key=f"{request}{seed}")[0] for seed in _SEEDS]


def _begin_first(server: HttpServer, request: str) -> list[str]:
    """Request three clips from a server, wait until the first one begins, and return their ids."""
    server.wait_ready()
    ids = _request_three(server, request)
    wait(lambda: server.video(ids[0])["step"] > 0)
    return ids


@pytest.mark.full
@pytest.mark.timing
def test_a_server_its_ranks_and_its_fork_server_are_killed_in_turn(folder: Path) -> None:
    """All clips are made, although the server, a rank and the fork server are killed one by one.

    The server is killed once more while one of its ranks is stopped.
    """
    with HttpServer(folder, *QUICK) as server:
        first = _begin_first(server, "first")
        server.stop(signal.SIGKILL)
    with HttpServer(folder, *QUICK) as server:
        assert _request_three(server, "first") == first  # the client repeats its requests
        wait_made(server, dict(zip(first, _SEEDS, strict=True)))
        second = _begin_first(server, "second")
        ranks, fork_server = ranks_of(server.process.pid), fork_server_of(server.process.pid)
        assert fork_server is not None
        os.kill(fork_server, signal.SIGKILL)
        os.kill(ranks[0], signal.SIGKILL)
        wait_made(server, dict(zip(second, _SEEDS, strict=True)))
        assert server.client.get("/health").json()["restarts"] >= 1
        assert fork_server_of(server.process.pid) not in (None, fork_server)
        last = _begin_first(server, "last")
        os.kill(ranks_of(server.process.pid)[0], signal.SIGSTOP)
        server.stop(signal.SIGKILL)
    with HttpServer(folder, *QUICK) as server:
        wait_made(server, dict(zip(last, _SEEDS, strict=True)))
        assert server.all_ids() == [*first, *second, *last]


@pytest.fixture
def lapsed(tmp_path: Path, database: str) -> Iterator[tuple[Serving, JobQueue, str]]:
    """Server whose lease on a clip has expired, the queue that requeued it, and the clip's id.

    The server is at the clip's step 2, and does not know yet that its lease has expired.
    """
    with (
        serving(tmp_path, demo_config(), url=database, stop=(1, 0, 2)) as own,
        closing(JobQueue(tmp_path, url=database, lease_seconds=0.1)) as other,
    ):
        own.store.lease_seconds = 0.1
        (id,) = own.store_jobs(demo_job(tmp_path, 1))
        own.wait_for_step(id, 2)
        own.store.lease_seconds = 3000.0
        wait(lambda: other.requeue_expired())
        yield own, other, id


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_clip_that_another_server_has_taken_is_not_published(
    lapsed: tuple[Serving, JobQueue, str], is_noticed: bool
) -> None:
    """A server does not publish a clip that another server has claimed meanwhile.

    Either the server notices early that it has lost its claim, or only when it completes the clip.
    """
    own, other, id = lapsed
    taken(other)
    if is_noticed:
        own.engine.dispatcher.revoke(own.store.renew(own.engine.dispatcher.steps_done)[0])
    own.go_on()
    own.wait(lambda: not own.engine.dispatcher.clips(), "the clip stays")
    now = own.job(id)
    assert (now.state, now.fencing_token, now.server) == (JobState.IN_PROGRESS, 2, other.server)
    remove_leftovers_now(other)
    assert list(own.folder.glob("clips/*.mp4*")) == []
    assert other.complete(id, {"own": True}, 2)


def test_a_server_does_not_make_a_clip_twice_at_once(
    lapsed: tuple[Serving, JobQueue, str],
) -> None:
    """A server that claims its own lost clip again makes that clip only once.

    It claims the clip before it knows that its first claim has ended.
    """
    own, other, id = lapsed
    own.engine.dispatcher.wake()
    own.wait(lambda: own.engine.dispatcher.clips()[0].is_revoked, "it is not noticed")
    own.go_on()
    (done,) = own.wait_final([id])
    assert done.state is JobState.COMPLETED
    remove_leftovers_now(other)
    clips = {path.name for path in own.folder.glob("clips/*.mp4*")}
    assert clips == {f"{id}-{done.fencing_token}.mp4", f"{id}-{done.fencing_token}.mp4.json"}
    assert done.fencing_token > 2


@pytest.mark.full
@pytest.mark.parametrize("number", [3, 1])
def test_a_short_soak(tmp_path: Path, number: int) -> None:
    none = {"clocks": 0, "storage": 0, "database": 0}
    asked = argparse.Namespace(jobs=12, clients=6, faults=4, servers=number, seed=1, **none)
    summary = soak(tmp_path, asked)
    assert summary["wrong"] == {}, summary["faults"]
