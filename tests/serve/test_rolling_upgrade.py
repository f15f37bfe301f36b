"""Queue with rows of a newer svdpp, with lost rows, and with queries of idle servers."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from svdpp.errors import RequestError
from svdpp.serve.job import JobState, UnreadableJobError
from svdpp.serve.queue import JobQueue
from svdpp.serve.retention import enforce_retention, move_orphans_aside, remove_job
from svdpp.serve.sqlite import BackendUnavailableError
from tests.support.engines import add, in_state, new_job, take_all
from tests.support.http_server import QUICK, HttpServer, ServerHere, error_of

_NEWER = ({"family": "of tomorrow"}, {"family": "svd", "of_tomorrow": 1}, {"family": ["svd"]})


def make_newer(queue: JobQueue, id: str, sampling: dict[str, Any] = _NEWER[1]) -> None:
    """Change a job's row in the queue to one that only a newer svdpp can read."""
    with queue.backend.transaction() as connection:
        values = json.dumps(sampling), id
        connection.execute("UPDATE jobs SET sampling = ? WHERE id = ?", values)


@pytest.mark.parametrize("sampling", _NEWER, ids=str)
def test_rows_of_a_newer_server_are_skipped_and_counted(
    each_store: JobQueue, sampling: dict[str, Any], told: list[str]
) -> None:
    queue = each_store
    newer, own = add(queue, idempotency_key="k"), add(queue)
    make_newer(queue, newer, sampling)
    assert [id for id, _ in queue.waiting()] == [own]
    assert [job.id for job in queue.page(owner="", limit=1, order="asc")] == [own]
    assert queue.get(newer) is None
    assert queue.is_unreadable(newer, "")
    assert not queue.is_unreadable(newer, "other")
    assert not queue.is_unreadable(own, "")
    with pytest.raises(UnreadableJobError):
        queue.add(new_job(idempotency_key="k"), max_open=None)
    assert take_all(queue) == [own]
    assert queue.num_unreadable == 1
    (line,) = told
    assert newer in line
    with queue.backend.transaction() as connection:
        connection.execute("UPDATE jobs SET state = 'completed', finished_at = 1.0")
    assert enforce_retention(queue, queue.now(), 1.0, None) == [own]
    assert not remove_job(queue, newer)


def test_an_unreadable_row_is_skipped_alone(each_store: JobQueue) -> None:
    """Other jobs with the same sampling parameters are made."""
    queue = each_store
    newer, own = add(queue), add(queue)
    with queue.backend.transaction() as connection:
        connection.execute("UPDATE jobs SET remarks = 'of tomorrow' WHERE id = ?", (newer,))
    later = add(queue)
    assert take_all(queue) == [own, later]
    assert queue.num_unreadable == 1
    assert queue.num_open() == 2


def test_webhooks_of_newer_rows_keep_their_attempts(each_store: JobQueue) -> None:
    queue = each_store
    newer, own = (
        in_state(queue, JobState.COMPLETED, callback_url="http://example.org") for _ in range(2)
    )
    make_newer(queue, newer)
    job = queue.claim_callback(60.0)
    assert job is not None
    assert job.id == own
    assert queue.claim_callback(60.0) is None
    query = "SELECT callback_attempts, callback_due FROM jobs WHERE id = ?"
    assert queue.backend.fetch_all(query, newer) == [(0, 0.0)]


@pytest.mark.slow
def test_an_upgrade_does_not_refuse_requests_that_are_stored(tmp_path: Path) -> None:
    with ServerHere(tmp_path / "data", *QUICK) as server:
        server.wait_ready()
        (newer,) = server.add(steps=1000)
        server.wait_for(newer, "in_progress")
        waiting = [server.add(steps=1000)[0] for _ in range(8)]
        make_newer(server.service.queue, waiting[-1])
        for status in ("", "?status=queued"):
            listed = server.client.get(f"/v1/videos{status}")
            assert listed.status_code == 200, listed.text
            assert waiting[-1] not in {video["id"] for video in listed.json()["data"]}
        assert "svdpp_unreadable_jobs 1.0\n" in server.client.get("/metrics").text
        assert server.request(steps=1000).status_code == 202
        error_of(server.client.get(f"/v1/videos/{waiting[-1]}"), 503, "newer_video")
        assert server.client.get("/ready").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("when", ["after", "during"])
def test_a_stored_job_is_answered_though_the_queue_goes_away(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    queue = server.service.queue  # type: ignore[attr-defined]
    stored: list[str] = []
    insert = JobQueue.add

    def adding(self: JobQueue, *values: Any, **more: Any) -> Any:
        job = insert(self, *values, **more)
        stored.append(job.id)
        if when == "during":  # the row is stored, but the connection fails before the response
            raise BackendUnavailableError("away")
        return job

    def away(*_: object) -> None:
        if stored:
            raise BackendUnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(JobQueue, "add", adding)
        if when == "after":
            patch.setattr(queue, "set_eta", away)
            patch.setattr(queue, "get", away)
            patch.setattr(queue, "waiting", away)
        answer = server.request()
    assert answer.status_code == 202, answer.text
    assert answer.json()["id"] == stored[0]
    server.wait_for(stored[0], "completed")


def test_clips_whose_rows_are_lost_are_not_taken_for_none(tmp_path: Path) -> None:
    """A server whose folder has clips, but whose queue has no rows, refuses to start.

    The rows are lost when the queue's file was copied without its write-ahead log.
    """
    folder = tmp_path / "data"
    with contextlib.closing(JobQueue(folder)) as queue:
        empty = (folder / "queue.sqlite3").read_bytes()
        id = in_state(queue, JobState.COMPLETED)
        (folder / "clips").mkdir()
        (folder / "clips" / f"{id}.mp4").touch()
    (folder / "queue.sqlite3").write_bytes(empty)
    with pytest.raises(RequestError, match=r"clips \(number: 1\), but its queue has no") as refused:
        JobQueue(folder)
    assert "`adopt`" in refused.value.hint
    with contextlib.closing(JobQueue(folder, adopts=True)) as queue:
        assert [path.name for path in move_orphans_aside(queue)] == [f"{id}.mp4"]
    JobQueue(folder).close()


def test_rows_are_in_the_file_itself_soon(tmp_path: Path) -> None:
    """Maintenance moves new rows from the write-ahead log to the file.

    A snapshot or copy of only the database file would lose the rows in the log.
    """
    folder, copy = tmp_path / "data", tmp_path / "copy.sqlite3"
    with contextlib.closing(JobQueue(folder)) as queue:
        id = add(queue)
        queue.backend.maintain()
        shutil.copy(folder / "queue.sqlite3", copy)
    with contextlib.closing(sqlite3.connect(copy)) as database:
        assert database.execute("SELECT id FROM jobs").fetchall() == [(id,)]


def test_what_idle_servers_look_for_is_found_by_an_index(
    each_store: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries: list[tuple[str, tuple[Any, ...]]] = []
    fetch_all = each_store.backend.fetch_all
    monkeypatch.setattr(
        each_store.backend, "fetch_all", lambda *query: queries.append((query[0], query[1:])) or []
    )
    each_store.pending_verifications()
    each_store.unverified()
    monkeypatch.undo()
    for (query, values), index in zip(queries, ("jobs_to_prove", "jobs_unproved"), strict=True):
        if each_store.is_shared:
            with each_store.backend.transaction() as connection:
                connection.execute("SET LOCAL enable_seqscan = off")
                plan = connection.execute(f"EXPLAIN {query}", values).fetchall()
        else:
            plan = fetch_all(f"EXPLAIN QUERY PLAN {query}", *values)
        assert index in str(plan), plan
