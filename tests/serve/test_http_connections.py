"""Connections that send half a request, in this process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")

from starlette.types import Receive, Scope, Send

from svdpp.serve import server
from svdpp.serve.address import bind
from tests.faults.processes import allowing_for_others

pytestmark = [pytest.mark.long, pytest.mark.timing]

HEAD_SECONDS = allowing_for_others(0.5)


async def slow(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers after several times the limit of a head."""
    if scope["type"] == "lifespan":
        for step in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{step}.complete"})
        return
    await asyncio.sleep(2 * HEAD_SECONDS)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    await send({"type": "http.response.body", "body": b"whole"})


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setattr(server, "_HEAD_SECONDS", HEAD_SECONDS)
    listening = threading.Event()
    bound = bind("127.0.0.1", 0)
    http = server._Http(slow, listening.set)
    thread = threading.Thread(target=http.run, args=([bound],))
    thread.start()
    assert listening.wait(30)
    with socket.create_connection(bound.getsockname(), timeout=30) as found:
        yield found
    http.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def read_all(connection: socket.socket) -> bytes:
    found = b""
    while part := connection.recv(65536):
        found += part
    return found


@pytest.mark.parametrize("half", [b"", b"GET / HT", REQUEST[:-2]], ids=repr)
def test_half_a_head_ends_the_connection(connection: socket.socket, half: bytes) -> None:
    connection.sendall(half)
    begun = time.monotonic()

    assert read_all(connection) == b""
    assert time.monotonic() - begun < 15


def test_an_answer_may_take_longer(connection: socket.socket) -> None:
    connection.sendall(REQUEST)

    assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_half_a_second_head_ends_the_connection(connection: socket.socket) -> None:
    connection.sendall(REQUEST)
    found = connection.recv(65536)
    connection.sendall(REQUEST[:10])

    assert (found + read_all(connection)).count(b"HTTP/1.1 200 OK") == 1
