"""The tables of the queue, and the SQLite file that has them unless servers share a database.

The statements of the queue are the same for both databases. `?` is a value, and `clock()` the time,
which is the database's own: the servers of a fleet need not agree on it.

A full disk must not keep clients from removing clips, which would free space. So a file holds some
space while there is enough, and is removed once the disk is full: a change of the queue fits then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from svdpp.errors import ClosedError, OutputError, RequestError
from svdpp.media import output_files
from svdpp.serve.job import JobState

#: The folder for files that no job has; a disk of its own may have one before there is a queue.
LOST = "lost+found"
#: The name of the file that holds the reserve.
RESERVE = ".svdpp-reserve"
#: The name of the file that the server of a data folder locks.
LOCK = "lock"

_LOW_BYTES = 256 * 2**20
# Of a disk that is smaller than eight times the above.
_LOW_PART = 8

_NAME = "queue.sqlite3"
# How long another program, such as a backup, may keep the file locked.
_BUSY_SECONDS = 10.0
#: SQLite's log grows to this size before it is written back.
_RESERVE_BYTES = 4 * 2**20

VERSION = 8

# `seq` is the order of the requests. `due` orders the jobs of one owner. `turn` of a job is what
# its owner had before the job was taken. `lease_until` is NULL if no other server shares the queue.
# `lost` counts the claims that ended because nobody renewed them.
_SCHEMA = f"""
CREATE TABLE jobs (
    seq {{serial}},
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    model TEXT NOT NULL,
    weights TEXT NOT NULL,
    seed BIGINT NOT NULL,
    sampling TEXT NOT NULL,
    photo TEXT NOT NULL,
    photo_name TEXT NOT NULL,
    photo_sha256 TEXT NOT NULL,
    photo_pixels BIGINT NOT NULL,
    videos TEXT NOT NULL,
    prompt TEXT,
    negative_prompt TEXT,
    created_at DOUBLE PRECISION NOT NULL,
    priority INTEGER NOT NULL,
    idempotency_key TEXT,
    due DOUBLE PRECISION NOT NULL,
    state TEXT NOT NULL CHECK (state IN ({", ".join(repr(str(state)) for state in JobState)})),
    server TEXT,
    token BIGINT NOT NULL,
    lease_until DOUBLE PRECISION,
    lost INTEGER NOT NULL DEFAULT 0,
    turn BIGINT NOT NULL DEFAULT 0,
    step INTEGER NOT NULL,
    started_at DOUBLE PRECISION,
    finished_at DOUBLE PRECISION,
    attempts INTEGER NOT NULL,
    cancel_asked BOOLEAN NOT NULL,
    promised_seconds DOUBLE PRECISION,
    error TEXT,
    metadata TEXT NOT NULL,
    proof TEXT NOT NULL,
    proof_reason TEXT,
    callback_url TEXT,
    callback_due DOUBLE PRECISION,
    callback_attempts INTEGER NOT NULL,
    callback_error TEXT
);
CREATE TABLE owners (owner TEXT PRIMARY KEY, turn BIGINT NOT NULL);
CREATE TABLE servers (id TEXT PRIMARY KEY, about TEXT NOT NULL, seen_at DOUBLE PRECISION NOT NULL);
CREATE UNIQUE INDEX jobs_idempotency ON jobs (owner, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
CREATE INDEX jobs_owner ON jobs (owner);
CREATE INDEX jobs_state ON jobs (state);
CREATE INDEX jobs_owner_state ON jobs (owner, state);
CREATE INDEX jobs_waiting ON jobs (owner, due) WHERE state = 'queued';
CREATE INDEX jobs_of_kind ON jobs (coalesce(nullif(weights, ''), model), owner, due, seq)
    WHERE state = 'queued';
CREATE INDEX jobs_callbacks ON jobs (callback_due) WHERE callback_url IS NOT NULL;
"""
# What each later version adds to the one before it. Additions only, with defaults: a server of the
# version before goes on while its neighbours are upgraded.
_ADDED: dict[int, str] = {}


class AwayError(OutputError):
    """The queue or the store is gone, or does not answer; whether a change was made is not known.

    It is logged once where that is noticed: who tries again, or is answered, need not.
    """


def schema(version: int, serial: str) -> str:
    """The statements that make the newest tables of those of a version; 0: there are none.

    `serial` is the type of a key that counts up.
    """
    added = [text for number, text in sorted(_ADDED.items()) if number > version]
    return "".join([*([] if version else [_SCHEMA.format(serial=serial)]), *added])


def check_version(version: int, where: str) -> None:
    """Refuses tables that this program does not know; 0: there are none."""
    if version not in (0, *(number - 1 for number in _ADDED), VERSION):
        raise RequestError(
            f"the queue has version {version}, and this svdpp reads version {VERSION}",
            f"use the svdpp that wrote it, or name another {where}",
        )


def check_own(folder: Path, own: set[str], restore: str) -> None:
    """Refuses a folder that has other files than its `own`."""
    names = set(os.listdir(folder)) - {LOCK, LOST, RESERVE, *own} if folder.exists() else set()
    if names:
        raise RequestError(
            f"the data folder {str(folder)!r} has no queue, but other files, such as "
            f"{min(names)!r}",
            f"{restore}, name another folder with --data, or add --adopt to use this one: files "
            "of a lost queue go to its lost+found, all others are left alone",
        )


def free_and_low(folder: Path) -> tuple[int, int]:
    """Free bytes of the disk, and the mark below which they are low."""
    disk = os.statvfs(folder)
    size = disk.f_blocks * disk.f_frsize
    return disk.f_bavail * disk.f_frsize, min(_LOW_BYTES, size // _LOW_PART)


class QueueFile:
    """The SQLite file of a data folder, which one process uses at a time; thread-safe.

    Every method but `close` raises OutputError if it fails, and ClosedError after `close`.

    The folder is created if it does not exist; one that has other files and no queue is refused
    unless `adopts`.
    """

    claim_locks: Sequence[tuple[str, str]] = [("", "")]
    """How a claim looks for its job, at first and then: the end of the query, and `alone`."""

    def __init__(self, folder: Path, *, adopts: bool = False) -> None:
        self._folder = folder
        self._path = folder / _NAME
        self._is_closed = False
        # A read need not wait for the disk to finish a write, so it has its own connection.
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        with self._errors(), contextlib.ExitStack() as opened:
            if not (adopts or self._path.exists()):
                check_own(folder, set(), f"restore its {_NAME}")
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
    def change(self, alone: str = "") -> Iterator[sqlite3.Connection]:  # noqa: ARG002  # all are
        """A transaction: durable after the block, and nothing of it if the block raises.

        No two that name the same `alone` run at the same time.
        """
        with self._writing, self._errors():
            self._keep_reserve()
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._check_there()
                self._writer.execute("COMMIT")
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    def rows(self, query: str, *values: Any) -> list[Any]:
        """The rows of a query, which does not wait for changes."""
        with self._reading, self._errors():
            return self._reader.execute(query, values).fetchall()

    def lock(self, name: str) -> AbstractContextManager[bool]:  # noqa: ARG002
        """Holds a lock during the block, unless another server does; whether it is held."""
        return contextlib.nullcontext(True)

    def listen(self, seconds: float) -> list[str]:  # noqa: ARG002
        """What servers have said, as soon as one does, at most after so many seconds."""
        return []

    @property
    def is_there(self) -> bool:
        """Whether the file still has its name; SQLite writes also to one without a name."""
        return self._on_disk() == self._opened_as

    def _check_there(self) -> None:
        if not self.is_there:
            raise AwayError(
                f"the queue {str(self._path)!r} was removed or replaced while it was in use",
                "move it back to its place, or end the server and restore it",
            )

    def _keep_reserve(self) -> None:
        """Gives the reserve up if the disk is full, and takes it back once there is enough."""
        reserve = self._folder / RESERVE
        free, low = free_and_low(self._folder)
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
        return [_identity(path) for path in (self._path, Path(f"{self._path}-wal"))]

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


def _identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        about = path.stat()
        return about.st_dev, about.st_ino
    return None


def _create(database: sqlite3.Connection) -> None:
    """Create the tables that are missing, in one transaction; refuse those of another program."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if not version and database.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise RequestError(
            "the data folder's queue.sqlite3 is a database of another program",
            "name another folder with --data",
        )
    check_version(version, "folder with --data")
    if version != VERSION:
        statements = schema(version, "INTEGER PRIMARY KEY AUTOINCREMENT")
        database.executescript(f"BEGIN; {statements} PRAGMA user_version = {VERSION}; COMMIT;")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
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
        database.create_function("clock", 0, time.time)
        yield database
