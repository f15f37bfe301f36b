"""A store in a folder of its own, and a server that many tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from svdpp.serve.queue import JobQueue

if TYPE_CHECKING:
    from tests.serve.http_server import HttpServer


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobQueue]:
    store = JobQueue(tmp_path / "data")
    yield store
    store.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server of quick clips; a start takes seconds of CPU time."""
    from tests.serve.http_server import QUICK, HttpServer  # needs the extra

    folder = tmp_path_factory.mktemp("server") / "data"
    with HttpServer(folder, *QUICK, "--max-upload-mb", "1") as server:
        server.wait_ready()
        yield server
