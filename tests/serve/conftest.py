"""Fixtures: databases and queues, a new one for each test; servers that a module's tests share."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loguru import logger

from svdpp.serve.auth import add_key
from svdpp.serve.queue import JobQueue
from tests.support.backends import Postgres, Swift, postgres_server, swift_server
from tests.support.http_server import DEMO, QUICK, HttpServer, ServerHere


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """Running PostgreSQL server for all tests of the session."""
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def swift() -> Iterator[Swift]:
    """Running S3 server (Swift) for all tests of the session."""
    with swift_server() as server:
        yield server


@pytest.fixture
def bucket(swift: Swift, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of an empty folder in a bucket of the S3 server.

    Environment variables have the S3 server's URL and its access keys.
    """
    for variable, value in swift.environment.items():
        monkeypatch.setenv(variable, value)
    return f"{swift.url}/{secrets.token_hex(8)}"


@pytest.fixture
def database(postgres: Postgres) -> Iterator[str]:
    """URL of a new, empty database in PostgreSQL."""
    name = f"test_{secrets.token_hex(8)}"
    postgres.execute(f"CREATE DATABASE {name}")
    yield postgres.url_of(name)
    postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def told() -> Iterator[list[str]]:
    """Log messages of the levels WARNING and above, as a list that grows during the test."""
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(line.strip()), format="{message}", level="WARNING")
    yield lines
    logger.remove(sink)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def queue_url(request: pytest.FixtureRequest) -> str | None:
    """URL of the job queue's database, for each backend. None means a SQLite file."""
    return None if request.param == "sqlite" else request.getfixturevalue("database")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobQueue]:
    """Job queue in a SQLite file."""
    with contextlib.closing(JobQueue(tmp_path / "data")) as store:
        yield store


@pytest.fixture
def each_store(tmp_path: Path, queue_url: str | None) -> Iterator[JobQueue]:
    """Job queue. Each test runs once with SQLite and once with PostgreSQL."""
    with contextlib.closing(JobQueue(tmp_path / "data", url=queue_url)) as store:
        yield store


@pytest.fixture
def start(tmp_path: Path, database: str) -> Iterator[Callable[..., HttpServer]]:
    """Function that starts one more svdpp server of a fleet, and returns it when it is ready."""
    with contextlib.ExitStack() as servers:

        def started(*options: str, folder: str = "data") -> HttpServer:
            options = (*options, "--queue", database)
            server = servers.enter_context(HttpServer(tmp_path / folder, *options))
            server.wait_ready()
            return server

        yield started


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Server of the dummy model, which takes about 10 ms per step, and writes no mp4 file."""
    with ServerHere(
        tmp_path_factory.mktemp("server") / "data", *QUICK, "--max-upload-mb", "1"
    ) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Server of the demo model, whose queue takes at most two unfinished clips."""
    clip = ("--steps", "8", "--frames", "2", "--max-queue", "2")
    with ServerHere(tmp_path_factory.mktemp("demo") / "data", *DEMO, *clip) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Server with API keys. The client has the key of `alice`; `other_key` is the key of `bob`."""
    folder = tmp_path_factory.mktemp("keyed")
    alice, bob = (add_key(folder / "keys", name) for name in ("alice", "bob"))
    options = (*QUICK, "--host", "0.0.0.0", "--api-key-file", str(folder / "keys"))
    with ServerHere(folder / "data", *options, key=alice) as server:
        server.other_key = bob
        server.wait_ready()
        yield server
