"""Queue with faults: a killed server, a damaged file, a full or missing disk, a held lock."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from svdpp.errors import ClosedError, OutputError, RequestError
from svdpp.serve import periodic_thread
from svdpp.serve import sqlite as sqlite_module
from svdpp.serve.job import JobState
from svdpp.serve.periodic_thread import PeriodicThread
from svdpp.serve.queue import JobQueue
from svdpp.serve.sqlite import RESERVE_FILE, BackendUnavailableError, StorageUnavailableError
from svdpp.serve.store import FileStore
from tests.support.dummies import HANG_SECONDS
from tests.support.engines import add, dummy_config, serving
from tests.support.http_server import QUICK, ServerHere, error_of, wait
from tests.support.small_disk import small_disk


def test_a_change_is_on_the_disk_as_a_whole(store: JobQueue, tmp_path: Path) -> None:
    """An acknowledged change is on the disk, and a failed transaction leaves nothing.

    So `kill -9` loses nothing that was acknowledged.
    """
    id = add(store)
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "queue.sqlite3")) as other:
        with pytest.raises(ZeroDivisionError), store.backend.transaction() as connection:
            assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            connection.execute("DELETE FROM jobs")
            raise ZeroDivisionError
        assert other.execute("SELECT id, state FROM jobs").fetchall() == [(id, "queued")]


def test_a_second_server_is_refused_by_name(store: JobQueue, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="another server") as refused:
        JobQueue(tmp_path / "data")
    assert repr(str(tmp_path / "data")) in refused.value.message
    store.close()
    JobQueue(tmp_path / "data").close()
    assert os.stat(tmp_path / "data").st_mode & 0o077 == 0, "it is for this user only"


def test_the_database_of_another_program_is_refused(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "queue.sqlite3")) as connection:
        connection.execute("CREATE TABLE theirs (value TEXT)")
    with pytest.raises(RequestError, match="another program"):
        JobQueue(tmp_path)


def test_damaged_pages_are_noticed_at_the_start(store: JobQueue, tmp_path: Path) -> None:
    """A damaged page is reported at the start, even if no query at the start reads that page."""
    for _ in range(200):
        add(store, input_name="x" * 1000)
    store.close()
    path = tmp_path / "data" / "queue.sqlite3"
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[middle : middle + 4096] = bytes(4096)
    path.write_bytes(content)
    with pytest.raises(OutputError, match="queue") as refused:
        JobQueue(tmp_path / "data")
    assert "damaged" in refused.value.hint
    assert "\n" not in refused.value.message


#: Size of the small disk. When less than an eighth of the disk is free, the server takes no more
#: requests.
SIZE = "size=64m"


@contextlib.contextmanager
def full_disk(disk: Path) -> Iterator[None]:
    """Keep a disk completely full during the block, as another program could."""
    with contextlib.suppress(OSError), (disk / "ballast").open("ab", buffering=0) as ballast:
        while ballast.write(bytes(4096)):
            pass
    try:
        yield
    finally:
        (disk / "ballast").unlink()


@pytest.mark.slow
def test_clips_wait_for_space(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk, serving(disk / "data", dummy_config()) as own:
        with full_disk(disk):
            own.wait(lambda: own.engine.dispatcher.unavailable_reason, "the disk is not looked at")
            ids = own.add(1, 2)
            own.wait(lambda: own.store.waiting(), "the queue is not read")
            assert own.states(ids) == [JobState.QUEUED] * 2
        assert {job.state for job in own.wait_final(ids)} == {JobState.COMPLETED}


@pytest.mark.slow
@pytest.mark.full
def test_clients_make_space_on_a_full_disk_and_after_a_restart(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", SIZE) as disk:
        folder = disk / "data"
        with ServerHere(folder, *QUICK) as server:
            server.wait_ready()
            done = server.add(3)
            server.wait_for(done[-1], "completed")
            running, *waiting = server.add(4, steps=1000)
            with full_disk(disk):
                assert server.client.get("/health").status_code == 200
                answer = server.client.get("/ready")
                assert answer.status_code == 503
                assert answer.json()["reason"] == "the disk is nearly full"
                error_of(server.request(), 503, "disk_full")
                for id in (done[0], running, waiting[0]):
                    assert server.client.delete(f"/v1/videos/{id}").is_success
                    wait(lambda id=id: not list(folder.rglob(f"{id}*")))
                assert not (folder / RESERVE_FILE).exists()
                assert server.stop() == 0
                again = ServerHere(folder, *QUICK)
                error_of(again.request(), 503, "disk_full")
                for id in (done[1], waiting[1]):
                    assert again.client.delete(f"/v1/videos/{id}").status_code == 200
                assert again.video(done[2])["status"] == "completed"
        with again:
            again.wait_ready()
            assert again.request().status_code == 202
            assert (folder / RESERVE_FILE).stat().st_blocks * 512 == 4 * 2**20


def test_a_thread_logs_a_failure_once_until_there_is_none(
    monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    """Repeated failures of a periodic task are logged once, until the task succeeds.

    An unavailable queue is not logged here, because the code that notices it logs it.
    """
    monkeypatch.setattr(periodic_thread, "_RETRY_SECONDS", 0.0)
    failed, away = PermissionError("no links here"), BackendUnavailableError("away")
    refused = OutputError("not now")
    turns = iter([away, failed, failed, away, None, failed, None, refused, ClosedError("closed")])

    def turn() -> None:
        if (error := next(turns)) is not None:
            raise error

    thread = PeriodicThread("test", turn, 0.0, error_message="it fails")
    thread.start()
    thread._worker.join(HANG_SECONDS)
    assert [line.partition("\n")[0] for line in told] == [
        *["it fails: no links here"] * 2,
        "it fails: not now",
    ]
    assert ["Traceback" in line for line in told] == [True, True, False], "a typed error has none"
    assert next(turns, "none") == "none"


def test_a_mistake_of_the_program_is_not_taken_for_a_store_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug, or a full local disk, does not count as an unavailable store."""
    store = FileStore(tmp_path, "memory://mistake")
    path = tmp_path / "file"
    path.touch()
    for error, raised in (
        (TypeError("a mistake"), TypeError),
        (OSError(errno.ENOSPC, "no space"), OutputError),
    ):
        monkeypatch.setattr(store._filesystem, "put_file", Mock(side_effect=error))
        with pytest.raises(raised):
            store.put(path)
        assert store.unavailable_reason == ""
    monkeypatch.setattr(store._filesystem, "put_file", Mock(side_effect=OSError("no network")))
    with pytest.raises(StorageUnavailableError, match="no network"):
        store.put(path)


@pytest.mark.slow
def test_a_queue_whose_lock_another_program_holds_is_named_as_such(
    store: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another program holds the lock of the queue's file, the error says so.

    Reads, for example by `/ready`, fail within seconds instead of waiting.
    """
    monkeypatch.setattr(sqlite_module, "_BUSY_SECONDS", 1.0)
    store.close()
    with contextlib.closing(JobQueue(tmp_path / "data")) as queue:
        add(queue)
        with contextlib.closing(sqlite3.connect(tmp_path / "data" / "queue.sqlite3")) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(OutputError, match="locked") as refused:
                add(queue)
            assert "if another program holds its lock" in refused.value.hint
            other.execute("ROLLBACK")
        with queue.backend._reading:  # type: ignore[union-attr]
            start = time.monotonic()
            with pytest.raises(OutputError, match="cannot be used") as refused:
                queue.num_open()
            assert "if another program holds its lock" in refused.value.hint
            assert time.monotonic() - start < 5
        assert queue.num_open() == 1
