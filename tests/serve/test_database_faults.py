"""Queue on a PostgreSQL that hangs or is read-only for a while; passwords are never shown."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from svdpp.errors import RequestError
from svdpp.serve import postgres as postgres_module
from svdpp.serve.job import JobState
from svdpp.serve.queue import JobQueue
from svdpp.serve.sqlite import BackendUnavailableError
from tests.support.backends import Postgres
from tests.support.engines import add, job_of, take_all

_SECRETS = ("pa55", "w0rd")


@pytest.fixture
def queue(tmp_path: Path, database: str) -> Iterator[JobQueue]:
    """Job queue in a PostgreSQL database."""
    with contextlib.closing(JobQueue(tmp_path / "data", url=database)) as queue:
        yield queue


def _set_read_only(postgres: Postgres, database: str, mode: str) -> None:
    """Make new sessions of a PostgreSQL database read-only ("on") or writable ("off")."""
    name = database.rpartition("/")[2]
    postgres.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = {mode}")


def _end_sessions(postgres: Postgres, database: str) -> None:
    name = database.rpartition("/")[2]
    postgres.execute(
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
    )


@pytest.mark.slow
def test_a_server_recovers_by_itself_after_a_read_only_spell(
    queue: JobQueue, postgres: Postgres, database: str
) -> None:
    queue.backend.listen(0.0)
    _set_read_only(postgres, database, "on")
    _end_sessions(postgres, database)
    for use in (queue.backend.check, lambda: add(queue), queue.counts):
        with pytest.raises(BackendUnavailableError, match="does not answer"):
            use()
    with pytest.raises(BackendUnavailableError):
        queue.backend.listen(1.0)
    _set_read_only(postgres, database, "off")
    time.sleep(postgres_module._RETRY_SECONDS)
    id = add(queue)
    queue.backend.check()
    assert job_of(queue, id).state is JobState.QUEUED
    queue.backend.listen(0.0)  # the backend listens for notifications again
    other = add(queue)
    assert queue.backend.listen(5.0) == ["queued"]
    assert take_all(queue) == [id, other]


@pytest.mark.slow
def test_a_session_that_has_become_read_only_is_replaced(queue: JobQueue) -> None:
    """A connection whose session has become read-only is replaced by a new connection.

    PostgreSQL does not close a session that becomes read-only.
    """
    id = add(queue)
    for connection in queue.backend._open.values():  # type: ignore[union-attr]
        connection.execute("SET default_transaction_read_only = on")
    with pytest.raises(BackendUnavailableError, match="read-only"):
        queue.backend.check()  # /ready makes the same check
    queue.backend.check()
    queue.backend._open["write"].execute(  # type: ignore[union-attr]
        "SET default_transaction_read_only = on"
    )
    with pytest.raises(BackendUnavailableError, match="read-only"):
        queue.cancel_waiting(id)
    assert queue.cancel_waiting(id)
    queue.backend.check()


@pytest.mark.slow
def test_notes_are_asked_for_until_it_succeeds(
    queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed LISTEN, the next call listens again and gets notifications."""
    monkeypatch.setattr(postgres_module, "_RETRY_SECONDS", 0.0)
    execute, failures = (
        postgres_module.PostgresConnection.execute,
        [psycopg.errors.ReadOnlySqlTransaction("no")],
    )

    def failing(
        connection: postgres_module.PostgresConnection, query: str, *values: object
    ) -> object:
        if query.startswith("LISTEN") and failures:
            raise failures.pop()
        return execute(connection, query, *values)  # type: ignore[arg-type]

    monkeypatch.setattr(postgres_module.PostgresConnection, "execute", failing)
    with pytest.raises(BackendUnavailableError):
        queue.backend.listen(0.0)
    queue.backend.listen(0.0)
    add(queue)
    assert queue.backend.listen(5.0) == ["queued"]


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["tcp", "unix"])
def test_a_database_that_hangs_is_away_within_the_deadline(
    tmp_path: Path, database: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    monkeypatch.setattr(postgres_module, "_CALL_SECONDS", 1.0)
    monkeypatch.setitem(postgres_module._NETWORK, "connect_timeout", 2)
    if wire == "unix":
        name = database.rpartition("/")[2]
        folder = str(postgres.folder).replace("/", "%2F")
        database = f"postgresql://svdpp@{folder}:{postgres.port}/{name}"
    with contextlib.closing(JobQueue(tmp_path / "data", url=database)) as queue:
        id = add(queue)
        for use in (queue.counts, queue.backend.check, lambda: queue.cancel_waiting(id)):
            with postgres.hanging():
                start = time.monotonic()
                with pytest.raises(BackendUnavailableError, match="does not answer"):
                    use()
                assert time.monotonic() - start < 8
            time.sleep(postgres_module._RETRY_SECONDS)
        assert queue.cancel_waiting(id)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://svd:pa55/w0rd@127.0.0.1:1/svdpp",
        "postgresql://svd:pa55@w0rd@127.0.0.1:1/svdpp",
        "postgresql://svd:pa55%w0rd@127.0.0.1:1/svdpp",
        "postgresql://svd:pa55?w0rd@127.0.0.1:1/svdpp",
        "postgresql://svd:pa55#w0rd@127.0.0.1:1/svdpp",
        "postgresql://127.0.0.1:1/svdpp?password=pa55&w0rd",
        "postgresql://127.0.0.1:1/svdpp?password=pa55@w0rd",
        "postgresql://127.0.0.1:1/svdpp?password=pa55%w0rd",
        "postgresql://svd:pa55w0rd@127.0.0.1:1/svdpp",
        "postgresql://127.0.0.1:1/svdpp?password=pa55w0rd",
        "postgres://svd:pa55%2Fw0rd@127.0.0.1:1/svdpp",
        "",
        "postgresql://",
        "postgresql://svd:pa55w0rd@",
    ],
)
def test_no_part_of_a_password_is_printed(tmp_path: Path, url: str) -> None:
    with pytest.raises((RequestError, BackendUnavailableError)) as refused:
        JobQueue(tmp_path, url=url)
    error = refused.value
    text = f"{error.message} {error.details} {error.__cause__}"
    assert not any(secret in text for secret in _SECRETS), text
    is_understood = "127.0.0.1:1/svdpp" in text
    assert is_understood == isinstance(error, BackendUnavailableError)


def test_the_address_of_a_database_shows_hosts_and_name() -> None:
    for url, shown in (
        ("postgresql://u:p@a:1,[::1]:2/db?sslmode=require", "postgresql://a:1,[::1]:2/db"),
        ("postgresql:///svdpp", "postgresql:///svdpp"),
        ("postgres://%2Fvar%2Frun/svdpp", "postgres://%2Fvar%2Frun/svdpp"),
        ("postgresql:///?host=/tmp&dbname=x", "postgresql:///"),
    ):
        assert postgres_module.address_of(url) == shown
