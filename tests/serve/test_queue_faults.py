"""The queue loses nothing if the server is killed or the disk fails."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from svdpp.errors import OutputError, RequestError
from svdpp.serve import database
from svdpp.serve.queue import JobQueue
from tests.serve.store_jobs import add
from tests.small_disk import small_disk


def test_what_is_acknowledged_is_committed(store: JobQueue, tmp_path: Path) -> None:
    """So that `kill -9` loses none of it: another connection sees each change, and no half one."""
    queued, completed, failed, cancelled, removed = ids = [
        add(store, created_at=float(age)) for age in range(5)
    ]
    changes: list[tuple[str, str | None, Callable[[str], object]]] = [
        *((id, "queued", store.get) for id in ids),
        *((id, "in_progress", lambda _: store.take_next()) for id in ids),
        (queued, "queued", lambda id: store.put_back(id, counts=True)),
        (completed, "completed", lambda id: store.complete(id, {})),
        (failed, "failed", lambda id: store.fail(id, {"message": "no"})),
        (cancelled, "cancelled", store.cancelled),
        (removed, "completed", lambda id: store.complete(id, {})),
        (removed, None, store.remove),
        (queued, "cancelled", store.cancel_waiting),
    ]
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "queue.sqlite3")) as other:
        for id, state, change in changes:
            assert change(id)
            found = other.execute("SELECT state FROM jobs WHERE id = ?", (id,)).fetchone()
            assert (found and found[0]) == state
        with pytest.raises(ZeroDivisionError), store.database.change() as database:
            database.execute("DELETE FROM jobs")
            raise ZeroDivisionError
        assert other.execute("SELECT count(*) FROM jobs").fetchone() == (4,)


def test_every_commit_waits_for_the_disk(store: JobQueue) -> None:
    with store.database.change() as database:
        assert database.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_second_server_is_refused_by_name(store: JobQueue, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="another server") as refused:
        JobQueue(tmp_path / "data")
    assert repr(str(tmp_path / "data")) in refused.value.message
    store.close()
    JobQueue(tmp_path / "data").close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: folder.write_text("a file"),
        lambda folder: (folder / "queue.sqlite3").mkdir(parents=True),
        lambda folder: folder.mkdir() or (folder / "queue.sqlite3").write_bytes(b"none " * 1000),
        lambda folder: (folder / "lock").mkdir(parents=True),
    ],
    ids=["a file", "a folder as queue", "text as queue", "a folder as lock"],
)
def test_a_folder_that_cannot_be_used_is_named(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    spoil(tmp_path / "data")
    with pytest.raises(OutputError, match="data"):
        JobQueue(tmp_path / "data")


def test_a_queue_of_another_version_is_refused(store: JobQueue, tmp_path: Path) -> None:
    store.database.rows("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(RequestError, match="version 99"):
        JobQueue(tmp_path / "data")


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "queue.sqlite3") as database:
        database.execute("CREATE TABLE theirs (value TEXT)")
    database.close()
    with pytest.raises(RequestError, match="another program"):
        JobQueue(tmp_path)


def test_a_queue_that_is_moved_away_or_replaced_is_noticed(tmp_path: Path) -> None:
    path, away = tmp_path / "queue.sqlite3", tmp_path / "away"
    with contextlib.closing(JobQueue(tmp_path)) as store:
        first = add(store)
        path.rename(away)
        with pytest.raises(OutputError, match="removed or replaced"):
            add(store)
        path.write_bytes(away.read_bytes())
        with pytest.raises(OutputError, match="removed or replaced"):
            store.cancel_waiting(first)
        away.rename(path)
        second = add(store)
        assert [id for id, _ in store.waiting()] == [first, second]


def test_damaged_pages_are_noticed_at_the_start(store: JobQueue, tmp_path: Path) -> None:
    """Those that no query of the start reads."""
    for _ in range(200):
        add(store, photo_name="x" * 1000)
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


def test_a_queue_that_another_program_locks_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.1)
    store = JobQueue(tmp_path)
    other = sqlite3.connect(tmp_path / "queue.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(OutputError, match="locked"):
        add(store)
    assert store.waiting() == []  # reads go on
    other.execute("ROLLBACK")
    other.close()
    assert add(store) == store.waiting()[0][0]
    store.close()


def test_a_store_goes_on_when_the_disk_has_space_again(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", "size=1m") as disk,
        contextlib.closing(JobQueue(disk / "data")) as store,
    ):
        ids = {add(store)}
        with pytest.raises(OSError, match="No space"), open(disk / "ballast", "wb") as ballast:
            while True:
                ballast.write(bytes(4096))
                ballast.flush()
        with pytest.raises(OutputError, match="full"):
            for _ in range(100):
                ids.add(add(store, photo_name="x" * 10_000))
        assert set(store.clips()) == ids, "what was acknowledged is there, and the rest is not"
        (disk / "ballast").unlink()
        ids.add(add(store))
        assert set(store.clips()) == ids


def test_a_read_only_disk_is_an_error(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "ro") as disk, pytest.raises(OutputError, match="Read-only"):
        JobQueue(disk / "data")


def test_a_folder_is_created_for_this_user_only(tmp_path: Path) -> None:
    JobQueue(tmp_path / "data").close()
    assert os.stat(tmp_path / "data").st_mode & 0o077 == 0
