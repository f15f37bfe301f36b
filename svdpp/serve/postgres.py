"""PostgreSQL backend of the queue, which several servers can share; needs the extra `fleet`.

The servers coordinate only through the database. A connection that has ended is replaced when it is
next used, so that a server recovers once the database is back. Each call has a deadline in the
client, because a stopped database, or a network that drops packets, sends no error.
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
# Seconds after a failed attempt to connect during which each call fails at once, without another
# attempt to connect.
_RETRY_SECONDS = 1.0
# Timeouts, so that a server that hangs in a transaction does not block the other servers.
_SETTINGS = """
SET statement_timeout = '10s';
SET idle_in_transaction_session_timeout = '5s';
SET client_min_messages = warning;
"""
# Seconds after which a call without a response fails: the 10 s of `statement_timeout`, and 2 s for
# the network. `tcp_user_timeout` alone would not suffice: if the database process is stopped, the
# kernel of its host still acknowledges the bytes.
_CALL_SECONDS = 12.0
# Seconds between two checks of the deadlines of running statements.
_WATCH_SECONDS = 0.5
# `target_session_attrs` makes libpq refuse a standby, and a primary that was made read-only.
_NETWORK: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "tcp_user_timeout": 10_000,
    "target_session_attrs": "read-write",
    "application_name": "svdpp",
}
# Errors after which the connection is replaced. InternalError is raised by a write on a database
# server that has become read-only. A new connection may reach a server that is writable.
_CONNECTION_ERRORS = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError)

# URL of a database. Special characters in user and password must be percent-encoded.
_URL = re.compile(
    r"(?P<scheme>postgres(?:ql)?://)(?:(?:[\w.~+-]|%[0-9a-fA-F]{2})*"
    r"(?::(?:[\w.~!$&'()*+,;=-]|%[0-9a-fA-F]{2})*)?@)?"
    r"(?P<place>(?:[\w.:,\[\]-]|%[0-9a-fA-F]{2})*(?:/(?:[\w.~-]|%[0-9a-fA-F]{2})*)?)"
    r"(?:\?(?P<query>(?:[\w.~!$'()*+,;:=&/-]|%[0-9a-fA-F]{2})*))?"
)


def address_of(url: str) -> str:
    """Return hosts and database of a `--queue` URL, without user and password, for messages.

    Raises:
        RequestError: The URL names neither a host nor a database, or has a special character that
            is not percent-encoded. libpq would split the URL at such a character, and could take a
            part of the password for the host. So the error does not quote the URL.
    """
    found = _URL.fullmatch(url)
    try:
        # The message of libpq is dropped, because the message can quote a password.
        values = {} if found is None else conninfo_to_dict(url)
    except psycopg.Error:
        found, values = None, {}
    if found is None:
        raise RequestError(
            "`queue` is not a URL of a PostgreSQL database, such as postgresql://svdpp@db/svdpp",
            "percent-encode special characters of user and password, such as %2F for /, %40 for @ "
            "and %25 for %, or leave the password to PGPASSWORD or ~/.pgpass",
            details={"field": "queue"},
        )
    if not values.keys() & {"host", "hostaddr", "dbname", "service"}:
        raise RequestError(
            "`queue` names neither a host nor a database",
            "name a host and a database, as in postgresql://svdpp@db/svdpp",
            details={"field": "queue"},
        )
    return found["scheme"] + found["place"]


class PostgresBackend:
    """Queue in a PostgreSQL database, with the methods of `SqliteBackend`.

    Missing tables are created. The queue's id is written to the store, so that a server with
    another store cannot use the queue.

    Args:
        url: URL of the database.
        store: Files that all servers of the queue share.
        adopts: Whether to start although the store or the data folder has files of another queue
            or program. True: these files are left alone. False: they cause a RequestError.
    """

    # Each entry is a locking clause and the name of an advisory lock. A claim locks the rows of a
    # job and its owner, so that simultaneous claims take jobs of different owners. The first entry
    # skips locked rows. If all owners with jobs are locked, the second entry is used, which waits
    # for the other claims.
    claim_locks = (
        ("FOR UPDATE OF jobs, owners SKIP LOCKED", ""),
        ("FOR UPDATE OF jobs", "take"),
    )
    clock_name = "the database's"
    """Name of the queue's clock in messages such as "the clock of this machine is 90 s ahead of the
    database's"."""
    is_there = True
    """Whether the database still exists. Always True here: if PostgreSQL is gone, each statement
    fails by itself. `SqliteBackend` has to check, because writes to an open SQLite file succeed
    even after the file was removed."""

    def __init__(self, url: str, store: FileStore, *, adopts: bool = False) -> None:
        self._address = address_of(url)
        self._store = store
        self._url = url
        self._is_closed = False
        self._locks = {use: threading.Lock() for use in ("write", "read", "listen")}
        self._open: dict[str, PostgresConnection] = {}
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
        """Close the queue's connections to PostgreSQL. A second call does nothing."""
        self._is_closed = True
        for use, lock in self._locks.items():
            with lock:
                self._drop(use)
        self._watchdog.close()

    @contextlib.contextmanager
    def transaction(self, advisory_lock: str = "") -> Iterator[PostgresConnection]:
        """Run the `with` block as a transaction, which is undone if the block raises an exception.

        Args:
            advisory_lock: Name of an advisory lock that the transaction holds; "": no lock.

        Raises:
            BackendUnavailableError: The database does not respond, or is read-only.
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
        """Return the rows of a query to the PostgreSQL database.

        Queries have a separate connection, so that they do not wait for transactions.

        Raises:
            BackendUnavailableError: The database does not respond, or is read-only.
        """
        with self._use("read"):
            return self._execute_reconnecting("read", query, values).fetchall()

    def check(self) -> None:
        """Raise an error unless the PostgreSQL database responds and can be written.

        Raises:
            BackendUnavailableError: The database does not respond, or is read-only.
        """
        # The check runs an UPDATE, because queries also succeed while the database is read-only.
        with self.transaction() as connection:
            connection.execute("UPDATE queue SET version = version WHERE false")

    def maintain(self) -> None:
        """Do nothing: PostgreSQL maintains itself."""

    def now(self) -> float:
        """Return the database's Unix time in seconds, which all servers use."""
        ((now,),) = self.fetch_all("SELECT clock()")
        return float(now)

    def skew(self) -> float:
        """Return the seconds by which this machine's clock is ahead of the database's."""
        before = time.time()
        now = self.now()
        return (before + time.time()) / 2 - now

    @contextlib.contextmanager
    def lock(self, name: str, *, waits: bool = False) -> Iterator[bool]:
        """Take a PostgreSQL advisory lock for the `with` block; yield whether this server has it.

        If the connection ends, the lock ends, too.

        Args:
            name: Name of the lock.
            waits: Whether to wait while another server holds the lock. False: yield False at once.

        Yields:
            Whether this server holds the lock.
        """
        key = "hashtext(current_schema), hashtext(?)"
        function = "pg_advisory_lock" if waits else "pg_try_advisory_lock"
        ((is_acquired,),) = self.fetch_all(f"SELECT {function}({key})", name)
        is_held = waits or is_acquired
        try:
            yield is_held
        finally:
            if is_held:
                # An error is ignored: if the connection has ended, the lock has ended with it.
                with contextlib.suppress(OutputError):
                    self.fetch_all(f"SELECT pg_advisory_unlock({key})", name)

    def listen(self, seconds: float) -> list[str]:
        """Wait for notifications that servers send through the queue; return their payloads.

        Args:
            seconds: Maximum seconds to wait. If no notification arrives, the list is empty.

        Raises:
            BackendUnavailableError: The database does not respond, or is read-only.
        """
        with self._use("listen"):
            connection = self._open.get("listen") or self._connect("listen", "LISTEN svdpp")
            notes = connection.raw.notifies(timeout=seconds, stop_after=1)
            return [note.payload for note in notes]

    def _open_or_create(self, *, adopts: bool) -> None:
        """Open the queue in PostgreSQL. Create its tables and store its id if they are missing."""
        ((is_there,),) = self.fetch_all("SELECT to_regclass('queue') IS NOT NULL")
        version, id = self.fetch_all("SELECT version, id FROM queue")[0] if is_there else (0, "")
        tables = upgrade(version, "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY")
        self._check_files(id, adopts=adopts)
        id = id or secrets.token_hex(16)
        # The id is stored before the transaction begins. Inside the transaction, a slow store would
        # keep the transaction open, and other servers would wait for its locks.
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
            # CREATE INDEX waits until all open transactions end, even if the index exists. So it
            # is run only for a missing index.
            ((found,),) = self.fetch_all("SELECT to_regclass(?)", name)
            if found is None:
                with self.transaction() as connection:
                    connection.execute(f"CREATE INDEX IF NOT EXISTS {name} ON {of}")
        self._store.bind_to_queue(id)

    def _check_files(self, id: str, *, adopts: bool) -> None:
        """Raise a `RequestError` if the store or data folder has files of another queue or program.

        The store of an existing queue must hold the queue's id. The store of a new queue must be
        empty.

        Args:
            id: Id of the queue in the database; empty for a new queue.
            adopts: Whether to accept such files. True: nothing is checked.
        """
        store = self._store
        if adopts:
            return
        if id and store.read_queue_id() != id:
            raise RequestError(
                f"{store.name} does not belong to the queue that `queue` names",
                "name the store that all servers of the queue share, or add `adopt` to use "
                "this store",
            )
        if store.is_remote or not id:
            allowed = (
                {UPLOADS_FOLDER, CLIPS_FOLDER, LATENTS_FOLDER}
                if store.is_remote
                else {QUEUE_ID_FILE}
            )
            check_no_foreign_files(store.folder, allowed, "set `queue` to the queue of this folder")
        # A store that has only the file with a queue's id counts as empty, because a server whose
        # start failed later may have written that file.
        if not id and (objects := store.objects().keys() - {QUEUE_ID_FILE}):
            raise RequestError(
                f"{store.name} belongs to no queue, but has objects, such as {min(objects)!r}",
                "name another prefix in the bucket, or add `adopt`: the objects are left alone",
            )

    # --- connections to the database --------------------------------------------------------------

    @contextlib.contextmanager
    def _use(self, use: str) -> Iterator[None]:
        """Lock the connection for `use` during the `with` block.

        Errors of PostgreSQL in the block are raised as errors of svdpp, such as
        BackendUnavailableError.

        Args:
            use: Purpose of the connection: `write`, `read` or `listen`.
        """
        if not self._locks[use].acquire(timeout=_CALL_SECONDS):
            raise self._unavailable_error("other threads have used the connection for too long")
        try:
            with self._errors(use):
                yield
        finally:
            self._locks[use].release()

    def _execute_reconnecting(
        self, use: str, query: str, values: Sequence[Any] = ()
    ) -> psycopg.Cursor[Any]:
        """Run an SQL statement; if the connection has ended, run it again on a new connection.

        The statement must be safe to run twice, because the first run may have succeeded.
        """
        if (connection := self._open.get(use)) is not None:
            try:
                return connection.execute(query, values)
            except _CONNECTION_ERRORS as error:
                self._drop(use)
                if connection.is_overdue or isinstance(error, psycopg.errors.QueryCanceled):
                    self._back_off(str(error))
                    raise
        return self._connect(use).execute(query, values)

    def _connect(self, use: str, *statements: str) -> PostgresConnection:
        """Open a PostgreSQL connection for `use`, run statements on it, and return it."""
        if self._is_closed or time.monotonic() < self._retry_at:
            raise psycopg.OperationalError(self._unavailable_reason)
        try:
            connection = PostgresConnection(self._url, self._watchdog)
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
        """Make calls fail at once, without an attempt to connect, for the next `_RETRY_SECONDS`."""
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
            "check that PostgreSQL runs there, accepts this user, and is not read-only",
            details={"queue": self._address, "reason": reason, "timeout_seconds": _CALL_SECONDS},
        )


class PostgresConnection:
    """PostgreSQL connection that translates SQLite's SQL, and gives each statement a deadline."""

    def __init__(self, url: str, watchdog: _Watchdog) -> None:
        self.raw = psycopg.connect(url, autocommit=True, **_NETWORK)
        self.is_overdue = False
        """Whether a statement got no response in time. The connection is then closed."""
        self._watchdog = watchdog
        try:
            self.execute(_SETTINGS)
        except BaseException:
            self.raw.close()
            raise

    def execute(self, query: str, values: Sequence[Any] = (), /) -> psycopg.Cursor[Any]:
        """Run an SQL statement written for SQLite on PostgreSQL, with a deadline for the response.

        Args:
            query: Statement with a `?` for each value.
            values: Values of the statement, in order.

        Raises:
            psycopg.OperationalError: No response came in time, or the connection has ended.
        """
        self._watchdog.deadlines[self] = time.monotonic() + _CALL_SECONDS
        try:
            return self.raw.execute(_translated(query), values or None)
        except psycopg.Error as error:
            if self.is_overdue:
                text = "no response in time"
                raise psycopg.OperationalError(text) from error
            raise
        finally:
            del self._watchdog.deadlines[self]

    def give_up(self) -> None:
        """Shut the connection's socket down, so that libpq stops waiting for a response."""
        self.is_overdue = True
        # These errors are raised if the connection has already ended.
        with contextlib.suppress(OSError, psycopg.Error):
            copy = socket.socket(fileno=os.dup(self.raw.fileno()))
            with copy:
                copy.shutdown(socket.SHUT_RDWR)


class _Watchdog:
    """Thread that ends PostgreSQL connections whose statements get no response in time."""

    def __init__(self) -> None:
        self.deadlines: dict[PostgresConnection, float] = {}
        """Deadline of the running statement of each connection, on the monotonic clock."""
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
