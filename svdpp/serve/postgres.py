"""PostgreSQL backend of the queue, which several servers share; needs the extra `fleet`.

Nothing else coordinates the servers. A connection that has ended is replaced when it is needed, so
a server goes on by itself once the database is back. Each call has a deadline of the client's own:
a database that is stopped, or behind a network that drops packets, sends no error.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from svdpp.errors import ClosedError, OutputError, RequestError
from svdpp.media import output_files
from svdpp.serve.job import CLIPS_FOLDER, INDEXES, LATENTS_FOLDER, UPLOADS_FOLDER, VERSION, upgrade
from svdpp.serve.sqlite import QUEUE_ID_FILE, BackendUnavailableError, check_no_foreign_files

if TYPE_CHECKING:
    from svdpp.serve.store import FileStore

_CLOCK = "extract(epoch FROM clock_timestamp())::float8"
# After a failure the database is left alone for so long.
_RETRY_SECONDS = 1.0
# A server that is stopped in a transaction must not stop the others.
_SETTINGS = """
SET statement_timeout = '10s';
SET idle_in_transaction_session_timeout = '5s';
SET client_min_messages = warning;
"""
# A call that has no answer by then is given up: the statement's own timeout, and two seconds for
# the way. `tcp_user_timeout` does not see a stopped process, whose kernel acknowledges all bytes.
_CALL_SECONDS = 12.0
_WATCH_SECONDS = 0.5
# A standby, or a primary that was made read-only, takes no connection of the queue.
_NETWORK: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "tcp_user_timeout": 10_000,
    "target_session_attrs": "read-write",
    "application_name": "svdpp",
}
# A standby changes nothing, and a session keeps the mode it began with: only a new one helps.
_CONNECTION_ERRORS = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError)

# Of a user name and a password, only characters that need no percent-encoding.
_URL = re.compile(
    r"(?P<scheme>postgres(?:ql)?://)(?:(?:[\w.~+-]|%[0-9a-fA-F]{2})*"
    r"(?::(?:[\w.~!$&'()*+,;=-]|%[0-9a-fA-F]{2})*)?@)?"
    r"(?P<place>(?:[\w.:,\[\]-]|%[0-9a-fA-F]{2})*(?:/(?:[\w.~-]|%[0-9a-fA-F]{2})*)?)"
    r"(?:\?(?P<query>(?:[\w.~!$'()*+,;:=&/-]|%[0-9a-fA-F]{2})*))?"
)


def address_of(url: str) -> str:
    """Return the hosts and the database of a `--queue` URL, for messages: no user, no password.

    Raises:
        RequestError: It names no database server, or libpq would read a part of its password as
            a host or a parameter. The error shows nothing of the URL.
    """
    found = _URL.fullmatch(url)
    try:
        # libpq's messages repeat what they do not understand, which may be a password.
        values = {} if found is None else conninfo_to_dict(url)
    except psycopg.Error:
        found, values = None, {}
    if found is None:
        raise RequestError(
            "`queue` takes a URL such as postgresql://svdpp@db/svdpp, and cannot read this one",
            "percent-encode special characters of user and password, such as %2F for /, %40 for @ "
            "and %25 for %; or leave the password to PGPASSWORD or ~/.pgpass",
            details={"field": "queue"},
        )
    if not values.keys() & {"host", "hostaddr", "dbname", "service"}:
        raise RequestError(
            "`queue` names neither a host nor a database",
            "name both, as in postgresql://svdpp@db/svdpp",
            details={"field": "queue"},
        )
    return found["scheme"] + found["place"]


class PostgresBackend:
    """Queue in the database of `url`, for servers that share the files of `store`.

    The tables are created if they do not exist. The store then has a mark, by which a server that
    sees another one is refused. The methods are those of `SqliteBackend`.
    """

    # A claim locks the job and its owner, whose turn it takes, so that claims at the same time take
    # the turns of several owners. With more claims than owners, one claim waits for the other.
    claim_locks = (
        ("FOR UPDATE OF jobs, owners SKIP LOCKED", ""),
        ("FOR UPDATE OF jobs", "take"),
    )
    clock_name = "the database's"
    """Name of the clock that `now` reads, for messages."""
    is_there = True
    """Whether the database exists: True, because each commit fails without it."""

    def __init__(self, url: str, store: FileStore, *, adopts: bool = False) -> None:
        self._address = address_of(url)
        self._store = store
        self._url = url
        self._is_closed = False
        self._locks = {use: threading.Lock() for use in ("write", "read", "listen")}
        self._open: dict[str, Connection] = {}
        self._watchdog = _Watchdog()
        self._retry_at = 0.0
        self._unavailable_reason = ""
        try:
            with output_files.disk_errors(f"cannot use the data folder {str(store.folder)!r}"):
                store.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with self.lock("tables", waits=True):
                    self._open_or_create(adopts=adopts)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the connections; do nothing the second time."""
        self._is_closed = True
        for use, lock in self._locks.items():
            with lock:
                self._drop(use)
        self._watchdog.close()

    @contextlib.contextmanager
    def transaction(self, advisory_lock: str = "") -> Iterator[Connection]:
        """Run a transaction, which holds the lock that `advisory_lock` names, if it does.

        Raises:
            AwayError: The database does not answer, or takes no changes.
        """
        with self._use("write"):
            lock = f"SELECT pg_advisory_xact_lock(hashtext(current_schema || '{advisory_lock}'))"
            self._execute_reconnecting("write", f"BEGIN; {lock}" if advisory_lock else "BEGIN")
            connection = self._open["write"]
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(psycopg.Error):
                    connection.execute("ROLLBACK")
                raise

    def fetch_all(self, query: str, *values: Any) -> list[Any]:
        """Return the rows of a query, by a connection of its own.

        Raises:
            AwayError: The database does not answer, or takes no changes.
        """
        with self._use("read"):
            return self._execute_reconnecting("read", query, values).fetchall()

    def check(self) -> None:
        """Check that the database answers and takes changes.

        Raises:
            AwayError: It does not.
        """
        # A read alone would still be answered while the database is read-only.
        with self.transaction() as connection:
            connection.execute("UPDATE queue SET version = version WHERE false")

    def maintain(self) -> None:
        """Do nothing: PostgreSQL maintains itself."""

    def now(self) -> float:
        """Return the unix time of the database in seconds, which is that of all servers."""
        ((now,),) = self.fetch_all("SELECT clock()")
        return float(now)

    def skew(self) -> float:
        """Return by how many seconds this machine's clock is ahead of the database's."""
        before = time.time()
        now = self.now()
        return (before + time.time()) / 2 - now

    @contextlib.contextmanager
    def lock(self, name: str, *, waits: bool = False) -> Iterator[bool]:
        """Hold a lock of the database during the block; it ends with the connection.

        Args:
            name: Name of the lock.
            waits: Whether to wait for servers that hold it.

        Yields:
            Whether it is held.
        """
        key = "hashtext(current_schema), hashtext(?)"
        function = "pg_advisory_lock" if waits else "pg_try_advisory_lock"
        ((is_acquired,),) = self.fetch_all(f"SELECT {function}({key})", name)
        is_held = waits or is_acquired
        try:
            yield is_held
        finally:
            if is_held:
                with contextlib.suppress(OutputError):  # the connection has ended
                    self.fetch_all(f"SELECT pg_advisory_unlock({key})", name)

    def listen(self, seconds: float) -> list[str]:
        """Return what servers have said, as soon as one does, at most after so many seconds.

        Raises:
            AwayError: The database does not answer, or takes no changes.
        """
        with self._use("listen"):
            connection = self._open.get("listen") or self._connect("listen", "LISTEN svdpp")
            notes = connection.raw.notifies(timeout=seconds, stop_after=1)
            return [note.payload for note in notes]

    def _open_or_create(self, *, adopts: bool) -> None:
        """Open the queue, or make the tables of a new one, which its store is marked for."""
        ((is_there,),) = self.fetch_all("SELECT to_regclass('queue') IS NOT NULL")
        version, id = self.fetch_all("SELECT version, id FROM queue")[0] if is_there else (0, "")
        tables = upgrade(version, "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY")
        self._check_files(id, adopts=adopts)
        id = id or secrets.token_hex(16)
        # Before the transaction, which must not wait for a store.
        if self._store.read_queue_id() != id:
            self._store.write_queue_id(id)
        if tables:
            with self.transaction() as connection:
                connection.execute(tables)
                if not version:
                    connection.execute(
                        "CREATE TABLE queue (version INT NOT NULL, id TEXT NOT NULL)"
                    )
                    connection.execute("INSERT INTO queue VALUES (?, ?)", (VERSION, id))
                connection.execute("UPDATE queue SET version = ?", (VERSION,))
        for name, of in INDEXES.items():
            # Asked first: the statement waits for all changes, even where the index exists.
            ((found,),) = self.fetch_all("SELECT to_regclass(?)", name)
            if found is None:
                with self.transaction() as connection:
                    connection.execute(f"CREATE INDEX IF NOT EXISTS {name} ON {of}")
        self._store.bind_to_queue(id)

    def _check_files(self, id: str, *, adopts: bool) -> None:
        """Refuse a folder or a store that other servers do not see, or that is of others."""
        store = self._store
        if adopts:
            return
        if id and store.read_queue_id() != id:
            raise RequestError(
                f"{store.name} is not that of the queue in `queue`",
                "name the one that all its servers share, or add `adopt` to make this one theirs",
            )
        if store.is_remote or not id:
            allowed = (
                {UPLOADS_FOLDER, CLIPS_FOLDER, LATENTS_FOLDER}
                if store.is_remote
                else {QUEUE_ID_FILE}
            )
            check_no_foreign_files(store.folder, allowed, "name the queue that it belongs to")
        # A mark may be of a start that failed.
        if not id and (objects := store.objects().keys() - {QUEUE_ID_FILE}):
            raise RequestError(
                f"{store.name} has no queue, but other objects, such as {min(objects)!r}",
                "name another place in the bucket, or add `adopt`: its objects are left alone",
            )

    # --- connections ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _use(self, use: str) -> Iterator[None]:
        """Hold the connection of a use during the block, and translate its errors."""
        if not self._locks[use].acquire(timeout=_CALL_SECONDS):
            raise self._unavailable_error("others have waited for it for too long")
        try:
            with self._errors(use):
                yield
        finally:
            self._locks[use].release()

    def _execute_reconnecting(
        self, use: str, query: str, values: Sequence[Any] = ()
    ) -> psycopg.Cursor[Any]:
        """Run a statement that can be repeated, because the connection may have ended before."""
        if (connection := self._open.get(use)) is not None:
            try:
                return connection.execute(query, values)
            except _CONNECTION_ERRORS as error:
                self._drop(use)
                if connection.is_overdue or isinstance(error, psycopg.errors.QueryCanceled):
                    self._back_off(str(error))
                    raise
        return self._connect(use).execute(query, values)

    def _connect(self, use: str, *statements: str) -> Connection:
        """Return a new connection, once it has run its first statements."""
        if self._is_closed or time.monotonic() < self._retry_at:
            raise psycopg.OperationalError(self._unavailable_reason)
        try:
            connection = Connection(self._url, self._watchdog)
            try:
                for statement in statements:
                    connection.execute(statement)
            except BaseException:
                connection.raw.close()
                raise
        except psycopg.Error as error:
            self._back_off(str(error))
            raise
        self._open[use] = connection
        return connection

    def _back_off(self, reason: str) -> None:
        """Leave the database alone for a moment: all others are told the reason at once."""
        self._unavailable_reason = reason
        self._retry_at = time.monotonic() + _RETRY_SECONDS

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
            if isinstance(error, _CONNECTION_ERRORS):
                self._drop(use)
                raise self._unavailable_error(reason) from error
            raise OutputError(
                f"the queue {self._address!r} cannot be used: {reason}",
                details={"queue": self._address, "reason": reason},
            ) from error

    def _unavailable_error(self, reason: str) -> BackendUnavailableError:
        return BackendUnavailableError(
            f"the queue {self._address!r} does not answer: {reason}",
            "check that PostgreSQL runs there, takes this user, and is not read-only",
            details={"queue": self._address, "reason": reason, "timeout_seconds": _CALL_SECONDS},
        )


class Connection:
    """Connection that takes the statements of the queue, each of which has a deadline."""

    def __init__(self, url: str, watchdog: _Watchdog) -> None:
        self.raw = psycopg.connect(url, autocommit=True, **_NETWORK)
        self.is_overdue = False
        """Whether a statement had no answer in time; the connection has ended then."""
        self._watchdog = watchdog
        try:
            self.execute(_SETTINGS)
        except BaseException:
            self.raw.close()
            raise

    def execute(self, query: str, values: Sequence[Any] = (), /) -> psycopg.Cursor[Any]:
        """Run a statement.

        Raises:
            psycopg.OperationalError: There was no answer in time, or the connection has ended.
        """
        self._watchdog.deadlines[self] = time.monotonic() + _CALL_SECONDS
        try:
            return self.raw.execute(_translated(query), values or None)
        except psycopg.Error as error:
            if self.is_overdue:
                text = "no answer in time"
                raise psycopg.OperationalError(text) from error
            raise
        finally:
            del self._watchdog.deadlines[self]

    def give_up(self) -> None:
        """End the wait for an answer, by the only thing that libpq always notices."""
        self.is_overdue = True
        with contextlib.suppress(OSError, psycopg.Error):  # the connection has ended by itself
            copy = socket.socket(fileno=os.dup(self.raw.fileno()))
            with copy:
                copy.shutdown(socket.SHUT_RDWR)


class _Watchdog:
    """Thread that ends the connections whose statements have no answer in time."""

    def __init__(self) -> None:
        self.deadlines: dict[Connection, float] = {}
        """Monotonic time until which the statement of each connection may take."""
        self._is_closed = threading.Event()
        threading.Thread(target=self._run, name="queue watchdog", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()

    def _run(self) -> None:
        while not self._is_closed.wait(_WATCH_SECONDS):
            now = time.monotonic()
            for connection, deadline in self.deadlines.copy().items():
                if now > deadline and not connection.is_overdue:
                    connection.give_up()


@functools.lru_cache(maxsize=256)
def _translated(query: str) -> bytes:
    query = query.replace("clock()", _CLOCK)
    if "?" in query:
        query = query.replace("%", "%%").replace("?", "%s")
    return query.encode()
