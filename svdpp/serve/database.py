"""The databases that a queue may be in, SQLite and PostgreSQL, and threads that outlast a failure.

The statements of the queue are the same for both. `?` is a value, and `clock()` the time, which is
the database's own: the servers of a fleet need not agree on it. In PostgreSQL a connection that has
ended is replaced when it is needed, so a server goes on by itself once the database is back.

A full disk must not keep clients from removing clips, which would free space. So a file holds some
space while there is enough, and is removed once the disk is full: a change of the queue fits then.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from svdpp.errors import ClosedError, OutputError, RequestError, redact
from svdpp.media import output_files
from svdpp.serve.job import CLIPS, LATENTS, PHOTOS, VERSION, upgrade

if TYPE_CHECKING:
    from svdpp.serve.store import FileStore

with contextlib.suppress(ImportError):  # of the extra `fleet`, which `--queue` needs
    import psycopg

#: For files that no job has; a disk of its own may have it before there is a queue.
LOST = "lost+found"
#: The file that holds the reserve.
RESERVE = ".svdpp-reserve"
#: The file that the server of a data folder locks.
LOCK = "lock"
#: The file, or object, that says which queue the files belong to.
MARK = "queue.id"

_LOW_BYTES = 256 * 2**20
# Of a disk that is smaller than eight times the above.
_LOW_PART = 8

_NAME = "queue.sqlite3"
# How long another program, such as a backup, may keep the file locked.
_BUSY_SECONDS = 10.0
# SQLite's log grows to this size before it is written back.
_RESERVE_BYTES = 4 * 2**20


class AwayError(OutputError):
    """The queue or the store is gone, or does not answer; whether a change was made is not known.

    It is logged once where that is noticed: who tries again, or is answered, need not.
    """


def _check_own(folder: Path, own: set[str], restore: str) -> None:
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
    """The SQLite file of a data folder, which one process uses at a time. Any thread may call it.

    Every method but `close` raises OutputError if it fails, and ClosedError after `close`. The
    folder is created; one that has other files and no queue is refused unless `adopts`.
    """

    claim_locks: Sequence[tuple[str, str]] = [("", "")]
    """How a claim looks for its job, at first and then: the end of the query, and `alone`."""

    def __init__(self, folder: Path, *, adopts: bool = False) -> None:
        self._folder = folder
        self._path = folder / _NAME
        self._is_closed = False
        # A read need not wait for the disk to finish a write, so it has its own connection.
        self._writing, self._reading = threading.Lock(), threading.Lock()
        with self._errors(), contextlib.ExitStack() as opened:
            if not (adopts or self._path.exists()):
                _check_own(folder, set(), f"restore its {_NAME}")
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
                if not self.is_there:
                    raise AwayError(
                        f"the queue {str(self._path)!r} was removed or replaced",
                        "move it back to its place, or end the server and restore it",
                    )
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

    def _keep_reserve(self) -> None:
        reserve = self._folder / RESERVE
        free, low = free_and_low(self._folder)
        if free < _RESERVE_BYTES:
            reserve.unlink(missing_ok=True)
        elif free > low + _RESERVE_BYTES and not reserve.exists():
            try:
                with reserve.open("xb") as file:
                    os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
            except OSError:  # a quota, perhaps: the queue works without
                output_files.remove(reserve)

    def _on_disk(self) -> list[int]:
        """The inodes of the queue and of its log; empty if one is missing."""
        with contextlib.suppress(OSError):
            return [os.stat(f"{self._path}{end}").st_ino for end in ("", "-wal")]
        return []

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if self._is_closed:
                raise ClosedError("the queue is closed") from error
            hint = "check that its disk has space and that this user may write to it"
            # Its subclasses are about the disk, or about a file that another program has locked.
            if type(error) is sqlite3.DatabaseError:
                hint = "it is damaged: restore a copy of it, or start with another folder"
            reason = output_files.reason(error)
            raise OutputError(
                f"the queue {str(self._path)!r} cannot be used: {reason}", hint
            ) from error


def _create(database: sqlite3.Connection) -> None:
    """Create the tables that are missing, in one transaction; refuse those of another program."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if not version and database.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise RequestError(
            "the data folder's queue.sqlite3 is a database of another program",
            "name another folder with --data",
        )
    if statements := upgrade(version, "INTEGER PRIMARY KEY AUTOINCREMENT"):
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


# --- PostgreSQL -----------------------------------------------------------------------------------

_CLOCK = "extract(epoch FROM clock_timestamp())::float8"
# After a failure the database, or what a thread does, is left alone for so long.
_RETRY_SECONDS = 1.0
# A server that is stopped in a transaction must not stop the others; a network that is cut is
# noticed.
_SETTINGS = """
SET statement_timeout = '15s';
SET idle_in_transaction_session_timeout = '5s';
SET client_min_messages = warning;
"""
_NETWORK: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "tcp_user_timeout": 10_000,
    "application_name": "svdpp",
}


class QueueServer:
    """A queue in the database of `url`, for servers that share the files of `store`.

    The tables are created if they do not exist. The store then has a mark, by which a server that
    sees another one is refused. The methods are those of `QueueFile`.
    """

    # A claim locks the job and its owner, whose turn it takes, so that claims at the same time take
    # the turns of several owners. With more claims than owners, one claim waits for the other.
    claim_locks = (
        ("FOR UPDATE OF jobs, owners SKIP LOCKED", ""),
        ("FOR UPDATE OF jobs", "take"),
    )
    is_there = True
    """Whether it was not removed: each commit says so itself."""

    def __init__(self, url: str, store: FileStore, *, adopts: bool = False) -> None:
        import psycopg  # noqa: F401  # which says what is wrong with it

        self._store = store
        self._url = url
        self._is_closed = False
        self._locks = {use: threading.Lock() for use in ("write", "read", "listen")}
        self._open: dict[str, Connection] = {}
        self._retry_at = 0.0
        self._why_away = ""
        with output_files.disk_errors(f"cannot use the data folder {str(store.folder)!r}"):
            store.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.lock("tables", waits=True):
                self._open_or_create(adopts=adopts)

    def close(self) -> None:
        """End the connections; does nothing the second time."""
        self._is_closed = True
        for use, lock in self._locks.items():
            with lock:
                self._drop(use)

    @contextlib.contextmanager
    def change(self, alone: str = "") -> Iterator[Connection]:
        """A transaction; `alone` is the name of a lock that it holds."""
        with self._locks["write"], self._errors("write"):
            lock = f"SELECT pg_advisory_xact_lock(hashtext(current_schema || '{alone}'))"
            self._first("write", f"BEGIN; {lock}" if alone else "BEGIN")
            connection = self._open["write"]
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(psycopg.Error):
                    connection.execute("ROLLBACK")
                raise

    def rows(self, query: str, *values: Any) -> list[Any]:
        """The rows of a query, by a connection of its own."""
        with self._locks["read"], self._errors("read"):
            return self._first("read", query, values).fetchall()

    @contextlib.contextmanager
    def lock(self, name: str, *, waits: bool = False) -> Iterator[bool]:
        """Holds a lock during the block, perhaps after others; it ends with the connection."""
        key = "hashtext(current_schema), hashtext(?)"
        function = "pg_advisory_lock" if waits else "pg_try_advisory_lock"
        ((answer,),) = self.rows(f"SELECT {function}({key})", name)
        is_held = waits or answer
        try:
            yield is_held
        finally:
            if is_held:
                with contextlib.suppress(OutputError):  # the connection has ended
                    self.rows(f"SELECT pg_advisory_unlock({key})", name)

    def listen(self, seconds: float) -> list[str]:
        """What servers have said, as soon as one does, at most after so many seconds."""
        with self._locks["listen"], self._errors("listen"):
            connection = self._open.get("listen")
            if connection is None:
                connection = self._connect("listen")
                connection.execute("LISTEN svdpp")
            notes = connection.raw.notifies(timeout=seconds, stop_after=1)
            return [note.payload for note in notes]

    def _open_or_create(self, *, adopts: bool) -> None:
        """Opens the queue, or makes the tables of a new one, which its store is marked for."""
        ((is_there,),) = self.rows("SELECT to_regclass('queue') IS NOT NULL")
        version, id = self.rows("SELECT version, id FROM queue")[0] if is_there else (0, "")
        tables = upgrade(version, "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY")
        self._check_files(id, adopts=adopts)
        id = id or secrets.token_hex(16)
        # Before the transaction, which must not wait for a store.
        if self._store.mark() != id:
            self._store.set_mark(id)
        if tables:
            with self.change() as statements:
                statements.execute(tables)
                if not version:
                    statements.execute(
                        "CREATE TABLE queue (version INT NOT NULL, id TEXT NOT NULL)"
                    )
                    statements.execute("INSERT INTO queue VALUES (?, ?)", (VERSION, id))
                statements.execute("UPDATE queue SET version = ?", (VERSION,))
        self._store.belong_to(id)

    def _check_files(self, id: str, *, adopts: bool) -> None:
        """Refuses a folder or a store that other servers do not see, or that is of others."""
        store = self._store
        if adopts:
            return
        if id and store.mark() != id:
            raise RequestError(
                f"{store.name} is not that of the queue in --queue",
                "name the one that all its servers share, or add --adopt to make this one theirs",
            )
        if store.is_remote or not id:
            own = {PHOTOS, CLIPS, LATENTS} if store.is_remote else {MARK}
            _check_own(store.folder, own, "name the queue that it belongs to")
        # A mark may be of a start that failed.
        if not id and (objects := store.objects().keys() - {MARK}):
            raise RequestError(
                f"{store.name} has no queue, but other objects, such as {min(objects)!r}",
                "name another place in the bucket, or add --adopt: its objects are left alone",
            )

    # --- connections ------------------------------------------------------------------------------

    def _first(self, use: str, query: str, values: Sequence[Any] = ()) -> psycopg.Cursor[Any]:
        """Runs a statement that can be repeated, because the connection may have ended before."""
        if use in self._open:
            with contextlib.suppress(psycopg.OperationalError, psycopg.InterfaceError):
                return self._open[use].execute(query, values)
            self._drop(use)
        return self._connect(use).execute(query, values)

    def _connect(self, use: str) -> Connection:
        if self._is_closed or time.monotonic() < self._retry_at:
            raise psycopg.OperationalError(self._why_away)
        try:
            connection = Connection(self._url)
        except psycopg.Error as error:
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            self._why_away = str(error)
            raise
        self._open[use] = connection
        return connection

    def _drop(self, use: str) -> None:
        if (connection := self._open.pop(use, None)) is not None:
            connection.raw.close()

    @contextlib.contextmanager
    def _errors(self, use: str) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            if self._is_closed:
                raise ClosedError("the queue is closed") from error
            reason = error.diag.message_primary or str(error).strip().partition("\n")[0]
            place = redact(self._url).partition("?")[0]
            if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
                self._drop(use)
                raise AwayError(
                    f"the queue {place!r} does not answer: {reason}",
                    "check that PostgreSQL runs there and takes this user",
                ) from error
            raise OutputError(f"the queue {place!r} cannot be used: {reason}") from error


class Connection:
    """A connection that takes the statements of the queue."""

    def __init__(self, url: str) -> None:
        self.raw = psycopg.connect(url, autocommit=True, **_NETWORK)
        self.raw.execute(_SETTINGS)

    def execute(self, query: str, values: Sequence[Any] = (), /) -> psycopg.Cursor[Any]:
        """Runs a statement."""
        return self.raw.execute(_translated(query), values or None)


@functools.lru_cache(maxsize=256)
def _translated(query: str) -> bytes:
    query = query.replace("clock()", _CLOCK)
    if "?" in query:
        query = query.replace("%", "%%").replace("?", "%s")
    return query.encode()


#: What takes the statements of a change.
Statements = sqlite3.Connection | Connection


# --- threads --------------------------------------------------------------------------------------


class Background:
    """Calls `turn` in a thread, again `seconds` after each end of it, or at once after `wake`.

    The first of several turns that fail is logged as `failure`, unless queue or store are away.
    When it is closed, it calls `last` instead, once; it also ends if the queue is closed.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], object],
        seconds: float,
        *,
        failure: str,
        last: Callable[[], object] = lambda: None,
    ) -> None:
        self._turn = turn
        self._last = last
        self._seconds = seconds
        self._failure = failure
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_woken = threading.Event()
        self.is_closing = False
        """Whether the turn should end."""

    def start(self) -> None:
        """Begins the first turn."""
        self._thread.start()

    def wake(self) -> None:
        """Has the next turn begin at once."""
        self._is_woken.set()

    def close(self, timeout: float | None = None) -> None:
        """Ends the thread, if it was started, and waits for the end of its turn."""
        self.is_closing = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        seconds = 0.0
        is_failing = is_over = False
        while not is_over:
            self._is_woken.wait(seconds)
            self._is_woken.clear()
            is_over = self.is_closing  # after the clearing, else `close` could go unnoticed
            seconds = max(self._seconds, _RETRY_SECONDS)
            try:
                (self._last if is_over else self._turn)()
                seconds, is_failing = self._seconds, False
            except ClosedError:
                return
            except AwayError:  # is logged where it is noticed
                pass
            except Exception as error:
                if not is_failing:
                    logger.opt(exception=True).error("{}: {}", self._failure, error)
                is_failing = True
