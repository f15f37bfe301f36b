"""Hostile requests to a real server: each is refused, and the server keeps working."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import httpx
import pytest

from tests.support.http_server import HANG_SECONDS, PHOTO, HttpServer, error_of

pytestmark = pytest.mark.slow

HEAD = b"POST /v1/videos HTTP/1.1\r\nHost: localhost\r\n"
FORM = b"Content-Type: multipart/form-data; boundary=x\r\n"


@pytest.fixture(autouse=True)
def unharmed(server: HttpServer) -> Iterator[None]:
    """Check after each test that the server has no new clip, file, restart or log line."""
    server.wait_ready()
    before = state_of(server)
    yield
    assert state_of(server) == before


def state_of(server: HttpServer) -> list[object]:
    newest = server.client.get("/v1/videos?limit=1").json()["first_id"]
    restarts = server.client.get("/health").json()["restarts"]
    return [newest, restarts, server.err, sorted((server.folder / "photos").iterdir())]


def part(name: str, value: bytes, more: str = "") -> bytes:
    head = f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode("latin-1") + value + b"\r\n"


END = part("input_reference", b"no photograph", '; filename="a.png"') + b"--x--\r\n"


def send_form(server: HttpServer, body: bytes, kind: str = "") -> httpx.Response:
    """Send `body` as a multipart form to /v1/videos, and return the response."""
    headers = {"content-type": f"multipart/form-data; boundary=x{kind}"}
    return server.client.post("/v1/videos", content=body, headers=headers)


# --- the form -----------------------------------------------------------------------------------


@pytest.mark.parametrize("charset", ["punycode", "undefined", ""])
def test_no_codec_but_utf_8(server: HttpServer, charset: str) -> None:
    """A charset other than UTF-8 is refused. Python would decode a megabyte of punycode for
    minutes.
    """
    body = part("prompt", b"a" * 500_000 + b"-" + b"a" * 500_000) + END
    error_of(send_form(server, body, f"; charset={charset}"), 415, "unsupported_charset")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (part("prompt", b"x" * 1_000_000) + END, 422),
        (b"".join(part(f"f{i}", b"") for i in range(2000)) + END, 400),
        (b"--x\r\n" + b"a: b\r\n" * 10_000 + b"\r\n\r\n--x--\r\n", 400),
        (part("seed", b"9" * 900_000) + END, 422),
        (part("seed", b"1") + part("seed", b"2") + END, 422),
        (part("input_reference", "夜".encode()) + b"--x--\r\n", 422),
    ],
    ids=["field", "fields", "headers", "digits", "twice", "text"],
)
def test_forms_beyond_all_limits(server: HttpServer, body: bytes, status: int) -> None:
    answer = send_form(server, body)
    assert answer.status_code == status, answer.text[:300]
    assert len(answer.text) < 5000


def test_deep_json(server: HttpServer) -> None:
    deep = b"[" * 60_000
    kind = {"content-type": "application/json"}
    for body in (deep, b'{"prompt":' * 60_000, b'{"input_reference": "\xff"}', b"", b"[1]"):
        answer = server.client.post("/v1/videos", content=body, headers=kind)
        message = error_of(answer, 400, "invalid_json")["message"]
        assert message.startswith("the body must be a JSON object, or a form")
    field = part("image_reference", b'{"image_url":' * 30_000) + b"--x--\r\n"
    error_of(send_form(server, field), 422, "invalid_request")
    path = "/v1/videos/video_0/verify"
    error_of(server.client.post(path, content=deep, headers=kind), 404, "video_not_found")
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    large = server.raw(f"{head}Content-Length: {2**20}\r\n\r\n".encode())
    assert large.startswith(b"HTTP/1.1 413 ")


# --- HTTP itself --------------------------------------------------------------------------------


def test_half_a_request_leaves_nothing(server: HttpServer) -> None:
    body = part("input_reference", PHOTO[:1000], '; filename="a"')
    with server.connected() as connection:
        connection.sendall(HEAD + FORM + b"Content-Length: 5000\r\n\r\n" + body)
        connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            connection.recv(65536)  # wait until the server closes the connection


def test_a_request_of_two_lengths(server: HttpServer) -> None:
    """A request with two lengths is refused.

    A proxy in front of the server might use the other length, and see two requests in the body.
    """
    lengths = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert server.raw(HEAD + FORM + lengths).startswith(b"HTTP/1.1 400 ")


def test_slow_uploads_leave_places_for_others(server: HttpServer) -> None:
    """Uploads that never end do not block other requests.

    This holds even if the server accepts no further upload.
    """
    with ExitStack() as opened:
        waiting = [opened.enter_context(server.connected()) for _ in range(40)]
        for connection in waiting:
            connection.sendall(HEAD + FORM + b"Content-Length: 5000\r\n\r\n--x\r\n")
        assert select.select(waiting, [], [], HANG_SECONDS)[0], "none is refused"
        answer = send_form(server, END)
        error_of(answer, 503, "too_many_uploads")
        assert int(answer.headers["retry-after"]) > 0
        assert server.client.get("/v1/videos").status_code == 200
