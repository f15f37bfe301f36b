"""The queue's database in PostgreSQL, which many servers share; needs the extra `fleet`.

Nothing else coordinates the servers. A connection that has ended is replaced when it is needed, so
a server goes on by itself once the database is back.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import psycopg

from svdpp.errors import ClosedError, OutputError, RequestError, redact
from svdpp.media import output_files
from svdpp.serve.database import MARK, AwayError, check_own
from svdpp.serve.job import CLIPS, LATENTS, PHOTOS, VERSION, upgrade

if TYPE_CHECKING:
    from svdpp.serve.store import FileStore

_CLOCK = "extract(epoch FROM clock_timestamp())::float8"
# After a failure the database is left alone for so long.
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
            check_own(store.folder, own, "name the queue that it belongs to")
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
