"""What stands before every route, without a server: keys, limits of a body, and their errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx
from fastapi import FastAPI
from loguru import logger
from starlette.types import ASGIApp, Receive, Scope, Send

from svdpp.serve import guard as guard_module
from svdpp.serve.auth import Owner
from svdpp.serve.guard import Guard
from svdpp.serve.views import install_error_handlers
from tests.serve.test_metrics import Server

FORM = {"content-type": "multipart/form-data; boundary=x"}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body and answers the owner's name and the number of bytes."""
    num_bytes, more = 0, True
    while more:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = json.dumps([scope["state"]["owner"].name, num_bytes]).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def guarded(app: ASGIApp = echo, **settings: Any) -> Guard:
    return Guard(app, **{"metrics": Server().metrics, **settings})


class Asked:
    """A client of a guard."""

    def __init__(self, guard: Guard) -> None:
        self._transport = httpx.ASGITransport(guard, raise_app_exceptions=False)

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return self.request("GET", path, headers=headers)

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(
                transport=self._transport, base_url="http://127.0.0.1"
            ) as client:
                return await client.request(method, path, **more)

        return asyncio.run(ask())


def test_a_poll_leaves_no_line_in_the_log() -> None:
    lines: list[str] = []
    sink = logger.add(lines.append, level="DEBUG", format="{level} {message}")
    try:
        asked = Asked(guarded())
        asked.get("/v1/videos/video_0")
        asked.request("DELETE", "/v1/videos/video_0")
        asked.get("/v1/videos/video_0", {"host": "evil.example"})
    finally:
        logger.remove(sink)
    assert lines == [
        "DEBUG DELETE /v1/videos/video_0 200\n",
        "DEBUG GET /v1/videos/video_0 403\n",
    ]


KEYS = {"s3cret": Owner("alice"), "other": Owner("bob", max_open=3)}


def test_a_key_names_the_owner() -> None:
    asked = Asked(guarded(owner_of=KEYS.get))
    key = {"Authorization": "Bearer s3cret"}

    assert asked.get("/v1/videos", key).json() == ["alice", 0]
    assert asked.get("/v1/videos", {"Authorization": "bearer  other"}).json() == ["bob", 0]
    # With keys the server may have any name.
    assert asked.get("/v1/videos", {**key, "Host": "clips.example"}).status_code == 200


@pytest.mark.parametrize(
    ("header", "words"),
    [(None, "is needed"), ("Bearer wrong", "unknown"), ("Basic s3cret", ""), ("Bearer", "needed")],
)
def test_without_a_key_nothing_is_served(header: str | None, words: str) -> None:
    asked = Asked(guarded(owner_of=KEYS.get))
    headers = {} if header is None else {"Authorization": header}
    for path in ("/v1/videos", "/v1/engine", "/metrics", "/v1/models"):
        answer = asked.get(path, headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert words in answer.json()["error"]["message"]
        assert "s3cret" not in answer.text
    for path in ("/", "/page/main.js", "/health", "/ready"):
        assert asked.get(path, headers).status_code == 200


def test_a_wrong_key_is_refused_before_the_body_is_read() -> None:
    async def never() -> AsyncIterator[bytes]:
        for part in (b"",):
            assert part, "the body is read"
            yield part

    asked = Asked(guarded(owner_of=KEYS.get))
    for key, status in (("s3cret", 500), ("wrong", 401)):
        headers = {**FORM, "Authorization": f"Bearer {key}"}
        answer = asked.request("POST", "/v1/videos", content=never(), headers=headers)
        assert answer.status_code == status


@contextlib.asynccontextmanager
async def uploading(
    has_to_wait: Callable[[Scope], bool], **settings: Any
) -> AsyncIterator[tuple[asyncio.Event, Callable[..., Awaitable[httpx.Response]]]]:
    """A guard whose app waits for an event, if a request has to; the event, and how to post."""
    gate = asyncio.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        if has_to_wait(scope):
            await gate.wait()
        await echo(scope, receive, send)

    transport = httpx.ASGITransport(guarded(waits, **settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def post(path: str = "/v1/videos", key: str = "") -> httpx.Response:
            headers = {**FORM, "Authorization": f"Bearer {key}"}
            return await client.post(path, content=b"x", headers=headers)

        yield gate, post


def test_the_uploads_of_one_key_leave_places_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "UPLOADS", 4)
    monkeypatch.setattr(guard_module, "UPLOADS_OF_KEY", 2)

    def is_alice(scope: Scope) -> bool:
        return bool(scope["state"]["owner"].name == "alice")

    async def ask() -> list[int]:
        async with uploading(is_alice, owner_of=KEYS.get) as (gate, post):
            held = [asyncio.ensure_future(post(key="s3cret")) for _ in range(2)]
            await asyncio.sleep(0)  # both begin before what follows
            refused, other = await post(key="s3cret"), await post(key="other")
            assert "2 images of this key" in refused.json()["error"]["message"]
            gate.set()
            answers = [refused, other, *[await each for each in held], await post(key="s3cret")]
            return [answer.status_code for answer in answers]

    assert asyncio.run(ask()) == [429, 200, 200, 200, 200]


def test_a_client_that_waits_for_its_clip_is_no_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "UPLOADS", 1)

    def waits_for_clip(scope: Scope) -> bool:
        if scope["path"] == "/v1/videos":
            return False
        scope["state"]["upload"].close()
        return True

    async def ask() -> list[int]:
        async with uploading(waits_for_clip) as (gate, post):
            waiting = [asyncio.ensure_future(post("/v1/videos/sync")) for _ in range(2)]
            await asyncio.sleep(0)
            answers = [await post()]
            gate.set()
            return [answer.status_code for answer in answers + [await each for each in waiting]]

    assert asyncio.run(ask()) == [200, 200, 200]


def test_an_error_in_a_route_is_answered() -> None:
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/v1/videos")
    def broken() -> None:
        raise KeyError("secret detail")

    answer = Asked(guarded(app)).get("/v1/videos")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(("localhost", True), ("LOCALHOST.", True), ("127.0.0.1:8000", True), ("127.9.9.9", True)),
        *(("[::1]:9", True), ("0.0.0.0", False), ("10.0.0.1", False), ("", False), ("::", False)),
        *(("localhost.evil.example", False), ("127.0.0.1.nip.io:80", False), ("2130706433", False)),
        *(("evil.example", False), ("169.254.169.254", False)),
    ],
)
def test_without_keys_only_names_of_this_machine_are_served(host: str, expected: bool) -> None:
    asked = Asked(guarded())
    for method, path in (("GET", "/v1/videos"), ("POST", "/v1/videos"), ("GET", "/")):
        for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}):
            answer = asked.request(method, path, headers={**FORM, **headers})
            assert answer.status_code == (200 if expected else 403)
            assert expected or answer.json()["error"]["code"] == "wrong_host"


@pytest.mark.parametrize("origin", ["http://evil.example", "null"])
def test_without_keys_pages_of_other_hosts_are_refused(origin: str) -> None:
    answer = Asked(guarded()).get("/v1/videos", {"Origin": origin})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_origin")
