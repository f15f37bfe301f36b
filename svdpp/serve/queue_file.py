"""The SQLite file of the queue: its tables, lock, connections and errors, and its disk's space.

A full disk must not keep clients from removing clips, which would free space. So a file holds some
space while there is enough, and is removed once the disk is full: a change of the queue fits then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from svdpp.errors import ClosedError, OutputError, RequestError
from svdpp.media import output_files
from svdpp.serve.job import JobState

#: The folder for files that no job has; a disk of its own may have one before there is a queue.
LOST = "lost+found"
#: The name of the file that holds the reserve.
RESERVE = ".svdpp-reserve"

_NAME = "queue.sqlite3"
_LOCK = "lock"
# How long another program, such as a backup, may keep the file locked.
_BUSY_SECONDS = 10.0
#: SQLite's log grows to this size before it is written back.
_RESERVE_BYTES = 4 * 2**20
_LOW_BYTES = 256 * 2**20
# Of a disk that is smaller than eight times the above.
_LOW_PART = 8


# `seq` is the order of the requests. `due` orders the jobs of one owner. `turn` of a job is what
# its owner had before the job was taken.
_SCHEMA = f"""
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    seed INTEGER NOT NULL,
    sampling TEXT NOT NULL,
    photo TEXT NOT NULL,
    photo_name TEXT NOT NULL,
    photo_sha256 TEXT NOT NULL,
    prompt TEXT,
    negative_prompt TEXT,
    created_at REAL NOT NULL,
    priority INTEGER NOT NULL,
    idempotency_key TEXT,
    state TEXT NOT NULL CHECK (state IN ({", ".join(repr(str(state)) for state in JobState)})),
    started_at REAL,
    finished_at REAL,
    attempts INTEGER NOT NULL,
    cancel_asked INTEGER NOT NULL,
    promised_seconds REAL,
    error TEXT,
    metadata TEXT NOT NULL,
    proof TEXT NOT NULL,
    due REAL NOT NULL,
    turn INTEGER NOT NULL DEFAULT 0,
    model TEXT NOT NULL DEFAULT '',
    weights TEXT NOT NULL DEFAULT '',
    held TEXT,
    proof_reason TEXT,
    photo_pixels INTEGER NOT NULL DEFAULT 0,
    videos TEXT NOT NULL DEFAULT '{{}}'
);
CREATE TABLE owners (owner TEXT PRIMARY KEY, turn INTEGER NOT NULL);
CREATE UNIQUE INDEX jobs_idempotency ON jobs (owner, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX jobs_owner ON jobs (owner);
CREATE INDEX jobs_state ON jobs (state);
CREATE INDEX jobs_owner_state ON jobs (owner, state);
CREATE INDEX jobs_waiting ON jobs (owner, due) WHERE state = 'queued';
"""

_VERSION = 6


class QueueFile:
    """The SQLite file of a data folder, which one process uses at a time; thread-safe.

    The folder is created if it does not exist; one that has other files and no queue is refused
    unless `adopts`. Every method but `close` raises OutputError if the disk is full or fails, and
    ClosedError after `close`.
    """

    def __init__(self, folder: Path, *, adopts: bool = False) -> None:
        self._folder = folder
        self._path = folder / _NAME
        self._is_closed = False
        # A read need not wait for the disk to finish a write, so it has its own connection.
        self._writing, self._reading = threading.Lock(), threading.Lock()
        with self._errors(), contextlib.ExitStack() as opened:
            if not adopts:
                _check_own(folder)
            opened.enter_context(_locked(folder))
            self._keep_reserve()
            self._writer = opened.enter_context(_connected(self._path))
            (verdict,) = self._writer.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict.splitlines()[-1])
            _create(self._writer)
            self._reader = opened.enter_context(_connected(self._path))
            output_files.sync(folder)
            self._opened_as = self._on_disk()
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Close the file and release the folder; does nothing the second time."""
        with self._writing, self._reading:
            self._is_closed = True
            self._opened.close()

    @contextlib.contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """A transaction: durable after the block, and nothing of it if the block raises."""
        with self._writing, self._errors():
            self._keep_reserve()
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self.check_there()
                self._writer.execute("COMMIT")
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    def rows(self, query: str, *values: Any) -> list[Any]:
        """The rows of a query, which does not wait for changes."""
        with self._reading, self._errors():
            return self._reader.execute(query, values).fetchall()

    def check_there(self) -> None:
        """Checks that the file still has its name; SQLite writes also to one without a name."""
        if self._on_disk() != self._opened_as:
            raise OutputError(
                f"the queue {str(self._path)!r} was removed or replaced while it was in use",
                "move it back to its place, or end the server and restore it",
            )

    @property
    def is_disk_low(self) -> bool:
        """Whether so little is free that no clip should be begun or taken."""
        try:
            free, low = _free_and_low(self._folder)
        except OSError:  # the folder is gone, or its disk
            return True
        return free < low

    def _keep_reserve(self) -> None:
        """Gives the reserve up if the disk is full, and takes it back once there is enough."""
        reserve = self._folder / RESERVE
        free, low = _free_and_low(self._folder)
        if free < _RESERVE_BYTES:
            reserve.unlink(missing_ok=True)
        elif free > low + _RESERVE_BYTES and not reserve.exists():
            try:
                with reserve.open("xb") as file:
                    os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
            except OSError:  # a quota, perhaps: the queue works without
                with contextlib.suppress(OSError):
                    reserve.unlink()

    def _on_disk(self) -> list[tuple[int, int] | None]:
        """Which files have the names of the queue and of its log; None: there is none."""
        paths = self._path, Path(f"{self._path}-wal")
        stats = [path.stat() if path.exists() else None for path in paths]
        return [stat and (stat.st_dev, stat.st_ino) for stat in stats]

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if self._is_closed:
                raise ClosedError("the queue is closed") from error
            # Its subclasses are about the disk, or about a file that another program has locked.
            is_damaged = type(error) is sqlite3.DatabaseError
            raise OutputError(
                f"the queue {str(self._path)!r} cannot be used: {output_files.reason(error)}",
                "it is damaged: restore a copy of it, or start with another folder"
                if is_damaged
                else "check that its disk has space and that this user may write to it",
            ) from error


def _create(database: sqlite3.Connection) -> None:
    """Create the tables of a new file, in one transaction; refuse a file of another program."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if not version and database.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise RequestError(
            "the data folder's queue.sqlite3 is a database of another program",
            "name another folder with --data",
        )
    if version not in (0, _VERSION):
        raise RequestError(
            f"the queue has version {version}, and this svdpp reads version {_VERSION}",
            "use the svdpp that wrote it, or name another folder with --data",
        )
    if not version:
        database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")


def _check_own(folder: Path) -> None:
    names = set(os.listdir(folder)) - {_LOCK, LOST, RESERVE} if folder.exists() else set()
    if names and _NAME not in names:
        raise RequestError(
            f"the data folder {str(folder)!r} has no queue, but other files, such as "
            f"{min(names)!r}",
            "restore its queue.sqlite3, name another folder with --data, or add --adopt to use "
            "this one: its files are left alone",
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which also ends with the process."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise RequestError(
            f"another server uses the data folder {str(folder)!r}",
            "stop it, or name another folder with --data",
        ) from None
    finally:
        os.close(lock)


@contextlib.contextmanager
def _connected(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(
        sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    ) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")  # a commit waits for the disk
        yield database


def _free_and_low(folder: Path) -> tuple[int, int]:
    """Free bytes of the disk, and the mark below which they are low."""
    disk = os.statvfs(folder)
    size = disk.f_blocks * disk.f_frsize
    return disk.f_bavail * disk.f_frsize, min(_LOW_BYTES, size // _LOW_PART)
