"""SQLite backend of the queue, for a single server.

The queue uses the same SQL for SQLite and PostgreSQL: `?` is a placeholder for a value, and
`clock()` is the unix time. In PostgreSQL, `clock()` reads the database's clock, because the clocks
of the servers may differ.

Clients must be able to remove clips even if the disk is full, but each removal also writes to the
queue. So the data folder has a reserve file, which takes up some space. It is removed once the disk
is full, so that these writes fit on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from svdpp.errors import ClosedError, OutputError, RequestError
from svdpp.media import output_files
from svdpp.serve.clock import SteadyClock
from svdpp.serve.job import INDEXES, VERSION, upgrade

#: Folder for files that belong to no job. In a data folder that is the root of a file system, the
#: system may have created a folder of this name, so the folder does not count as a foreign file.
LOST_AND_FOUND = "lost+found"
#: File that reserves disk space for changes of the queue, and is removed when the disk is full.
RESERVE_FILE = ".svdpp-reserve"
#: Name of the file that a server locks, so that no second server uses its data folder.
LOCK_FILE = "lock"
#: File, or object of a store, with the id of the queue that the files belong to.
QUEUE_ID_FILE = "queue.id"

# A disk counts as almost full if fewer bytes than `_LOW_BYTES` are free. On a small disk, the limit
# is lower: the disk's size divided by `_LOW_PART`.
_LOW_BYTES = 256 * 2**20
_LOW_PART = 8

_NAME = "queue.sqlite3"
# Seconds that a change waits for another program, such as a backup, that locks the file.
_BUSY_SECONDS = 10.0
# Seconds that a read waits for another program that locks the file. The time is shorter than for
# changes, because readiness checks wait for reads.
_READ_BUSY_SECONDS = 2.0
# Error codes of SQLite after a failure to lock the file.
_LOCK_ERRORS = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_BUSY_RECOVERY,
    sqlite3.SQLITE_BUSY_SNAPSHOT,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_IOERR_LOCK,
    sqlite3.SQLITE_IOERR_UNLOCK,
    sqlite3.SQLITE_IOERR_RDLOCK,
    sqlite3.SQLITE_IOERR_CHECKRESERVEDLOCK,
    sqlite3.SQLITE_IOERR_SHMLOCK,
}
# Error numbers of a file system that has no locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP}
# Size of the reserve file in bytes: the size to which SQLite's log grows before it is written back.
_RESERVE_BYTES = 4 * 2**20


class BackendUnavailableError(OutputError):
    """Error for a queue or a store that is gone or does not respond.

    If the failed call was a change, it is unknown whether the change was made. Dispatcher, fleet
    and store log the error once; other callers do not log it.
    """


class StorageUnavailableError(BackendUnavailableError):
    """Error for unreachable files: the folder is not mounted, or the store does not respond."""


def check_no_foreign_files(folder: Path, allowed: set[str], restore: str) -> None:
    """Raise a `RequestError` if a data folder without a queue has files that are not allowed.

    Args:
        folder: Data folder, which need not exist.
        allowed: Names of files that the folder may have.
        restore: Beginning of the error's hint: advice on how to restore the queue, such as
            `restore its queue.sqlite3`.

    Raises:
        RequestError: The folder has a file that is not in `allowed`.
    """
    names = (
        set(os.listdir(folder)) - {LOCK_FILE, LOST_AND_FOUND, RESERVE_FILE, *allowed}
        if folder.exists()
        else set()
    )
    if names:
        raise RequestError(
            f"the data folder {str(folder)!r} has no queue, but other files, such as "
            f"{min(names)!r}",
            f"{restore}, or name another folder with `data`, or add `adopt` to use this one: files "
            "of a lost queue go to its lost+found, all others are left alone",
            details={"file": min(names)},
        )


def disk_space(folder: Path) -> tuple[int, int]:
    """Return the free bytes of a folder's disk, and the limit below which it counts as full.

    Raises:
        OSError: The folder or its disk is gone.
    """
    disk = os.statvfs(folder)
    size = disk.f_blocks * disk.f_frsize
    return disk.f_bavail * disk.f_frsize, min(_LOW_BYTES, size // _LOW_PART)


class SqliteBackend:
    """SQLite database in a data folder, which one process uses at a time. Thread-safe.

    Every method except `close` raises OutputError if it fails, and ClosedError after `close`.

    Args:
        folder: Data folder, which is created.
        adopts: Whether to start a new queue in a folder that has files but no queue database.
            False: such a folder causes a RequestError.
    """

    claim_locks: Sequence[tuple[str, str]] = [("", "")]
    """Locks with which `claim` tries to get a job, in this order. Each entry is an SQL locking
    clause, such as `FOR UPDATE`, and the name of an advisory lock. SQLite needs neither."""

    clock_name = "what it was when the server started"
    """Name of the queue's clock in messages such as "the clock of this machine is 90 s ahead of
    what it was when the server started"."""

    def __init__(self, folder: Path, *, adopts: bool = False) -> None:
        self._clock = SteadyClock()
        self._folder = folder
        self._path = folder / _NAME
        self._is_closed = False
        # Inodes of the database file and its log when they were opened, by which `is_there` notices
        # that a file was removed or replaced. Empty until the files are open.
        self._opened_as: list[int] = []
        # Reads have their own connection, so that they do not wait until a write is on the disk.
        self._writing, self._reading = threading.Lock(), threading.Lock()
        with self._errors(), contextlib.ExitStack() as opened:
            if not (adopts or self._path.exists()):
                check_no_foreign_files(folder, set(), f"restore its {_NAME}")
            opened.enter_context(_locked(folder))
            self._keep_reserve()
            self._writer = opened.enter_context(_connected(self._path, self._clock))
            (verdict,) = self._writer.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict.splitlines()[-1])
            _create(self._writer)
            # SQLite's write-ahead log is written into the database file now. So if the log is lost,
            # only changes since this start are lost with it.
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._reader = opened.enter_context(
                _connected(self._path, self._clock, _READ_BUSY_SECONDS)
            )
            output_files.fsync(folder)
            self._opened_as = self._on_disk()
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Close the SQLite file and release the data folder. A second call does nothing."""
        with self._writing, self._reading:
            self._is_closed = True
            self._opened.close()

    @contextlib.contextmanager
    def transaction(
        self,
        advisory_lock: str = "",  # noqa: ARG002
    ) -> Iterator[sqlite3.Connection]:
        """Run the `with` block as a transaction, which is undone if the block raises an exception.

        Args:
            advisory_lock: Ignored, because transactions in SQLite never overlap.

        Raises:
            BackendUnavailableError: The file was removed or replaced.
            OutputError: The file cannot be used.
        """
        with self._errors(), _acquired(self._writing, _BUSY_SECONDS):
            self._keep_reserve()
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                if not self.is_there:
                    raise self._unavailable()
                self._writer.execute("COMMIT")
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    def fetch_all(self, query: str, *values: Any) -> list[Any]:
        """Return the rows of a query to the SQLite file, without waiting for a running transaction.

        Raises:
            OutputError: The file cannot be used.
        """
        with self._errors(), _acquired(self._reading, _READ_BUSY_SECONDS):
            return self._reader.execute(query, values).fetchall()

    def check(self) -> None:
        """Raise an `OutputError` unless the SQLite file can be written.

        Raises:
            OutputError: The file cannot be written, or another program holds its locks.
        """
        with self.transaction():
            pass

    def now(self) -> float:
        """Return the Unix time in seconds, without jumps of the machine's clock."""
        return self._clock.now()

    def skew(self) -> float:
        """Return the seconds by which the machine's clock has jumped ahead since the start."""
        return self._clock.skew()

    def maintain(self) -> None:
        """Write SQLite's log into the database file, so that a backup of this file is recent."""
        with self._writing, self._errors():
            self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def lock(self, name: str) -> AbstractContextManager[bool]:  # noqa: ARG002
        """Yield True in place of a lock, because no other server uses the SQLite database."""
        return contextlib.nullcontext(True)

    def listen(self, seconds: float) -> list[str]:  # noqa: ARG002
        """Return no notifications at once, because no other server uses the SQLite database.

        Args:
            seconds: Longest time to wait in seconds, which is ignored.
        """
        return []

    @property
    def is_there(self) -> bool:
        """Whether the SQLite file is still in its place; SQLite does not notice a removed file."""
        return self._on_disk() == self._opened_as

    def _keep_reserve(self) -> None:
        reserve = self._folder / RESERVE_FILE
        free, low = disk_space(self._folder)
        if free < _RESERVE_BYTES:
            reserve.unlink(missing_ok=True)
        elif free > low + _RESERVE_BYTES and not reserve.exists():
            try:
                with reserve.open("xb") as file:
                    os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
            except OSError:  # the disk may be full; the queue works without a reserve
                output_files.remove(reserve)

    def _on_disk(self) -> list[int]:
        """Return the inodes of the SQLite file and of its log; empty if one is missing."""
        with contextlib.suppress(OSError):
            return [os.stat(f"{self._path}{end}").st_ino for end in ("", "-wal")]
        return []

    def _unavailable(self) -> BackendUnavailableError:
        return BackendUnavailableError(
            f"the queue {str(self._path)!r} was removed or replaced",
            "move the file back to its place, or stop the server and restore the file",
        )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if self._is_closed:
                raise ClosedError("the queue is closed") from error
            # If the file is gone, that is the cause, so the error of SQLite is replaced.
            if self._opened_as and not self.is_there:
                raise self._unavailable() from error
            hint = "check that the disk has space and that this user may write to the file"
            code = getattr(error, "sqlite_errorcode", 0)
            # SQLite raises DatabaseError itself only for a damaged file, and subclasses of it for
            # disk errors and for locks of other programs.
            if type(error) is sqlite3.DatabaseError:
                hint = "the file is damaged: restore a copy, or start with another folder"
            elif code in _LOCK_ERRORS or getattr(error, "errno", 0) in _NO_LOCKS:
                hint = (
                    "if another program holds its lock, end that program; if the file system has "
                    "no locks, name a folder on a local disk with `data`"
                )
            reason = output_files.error_reason(error)
            raise OutputError(
                f"the queue {str(self._path)!r} cannot be used: {reason}",
                hint,
                details={"reason": reason},
            ) from error


@contextlib.contextmanager
def _acquired(lock: threading.Lock, seconds: float) -> Iterator[None]:
    """Hold a thread lock in the `with` block; raise SQLITE_BUSY after a timeout."""
    if not lock.acquire(timeout=seconds):
        error = sqlite3.OperationalError("other threads have used it for too long")
        error.sqlite_errorcode = sqlite3.SQLITE_BUSY
        raise error
    try:
        yield
    finally:
        lock.release()


def _create(connection: sqlite3.Connection) -> None:
    """Create or upgrade the queue's tables in SQLite; refuse a database of another program."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if not version and connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise RequestError(
            "the data folder's queue.sqlite3 is a database of another program",
            "name another folder with `data`",
        )
    if statements := upgrade(version, "INTEGER PRIMARY KEY AUTOINCREMENT"):
        connection.executescript(f"BEGIN; {statements} PRAGMA user_version = {VERSION}; COMMIT;")
    for name, of in INDEXES.items():
        connection.execute(f"CREATE INDEX IF NOT EXISTS {name} ON {of}")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise RequestError(
            f"another server uses the data folder {str(folder)!r}",
            "stop that server, or name another folder with `data`",
        ) from None
    finally:
        os.close(lock)


@contextlib.contextmanager
def _connected(
    path: Path, clock: SteadyClock, busy_seconds: float = _BUSY_SECONDS
) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(
        sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, check_same_thread=False)
    ) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        # A commit waits until the data are on the disk.
        connection.execute("PRAGMA synchronous = FULL")
        connection.create_function("clock", 0, clock.now)
        yield connection
