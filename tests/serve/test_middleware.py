"""HTTP middleware without a server: API keys, limits on bodies, hosts, and errors."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from svdpp.errors import (
    InputError,
    OutOfMemoryError,
    OutputError,
    RankError,
    RequestError,
    SvdppError,
)
from svdpp.serve import middleware as middleware_module
from svdpp.serve.auth import Owner, new_key, read_keys
from svdpp.serve.middleware import AuthMiddleware
from svdpp.serve.schemas import error_body, error_response, install_error_handlers, to_api_error
from svdpp.serve.uploads import DecoderBusyError
from tests.support.http_server import error_of

FORM = {"content-type": "multipart/form-data; boundary=x"}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond to a request with its owner's name and its number of bytes, as a stand-in app."""
    request = Request(scope, receive)
    answer = JSONResponse([request.state.owner.name, len(await request.body())])
    await answer(scope, receive, send)


class AuthClient:
    """HTTP client of an app behind `AuthMiddleware`, with the requests that the metrics counted."""

    def __init__(self, owner_of: Any = None, app: ASGIApp = echo) -> None:
        self.requests: list[tuple[str, str, int]] = []
        metrics: Any = SimpleNamespace(count_request=lambda *about: self.requests.append(about[:3]))
        middleware = AuthMiddleware(app, metrics, owner_of=owner_of)
        transport = httpx.ASGITransport(middleware, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return self.request("GET", path, headers=headers)

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        return asyncio.run(self.client.request(method, path, **more))


KEYS = {"s3cret": Owner("alice"), "other": Owner("bob", max_open=3)}


def test_a_key_names_the_owner() -> None:
    asked = AuthClient(KEYS.get)
    key = {"Authorization": "Bearer s3cret"}

    assert asked.get("/v1/videos", key).json() == ["alice", 0]
    assert asked.get("/v1/videos", {"Authorization": "bearer  other"}).json() == ["bob", 0]
    # A server with keys accepts any host name.
    assert asked.get("/v1/videos", {**key, "Host": "clips.example"}).status_code == 200


@pytest.mark.parametrize(
    ("header", "words"),
    [(None, "is needed"), ("Bearer wrong", "unknown"), ("Basic s3cret", ""), ("Bearer", "needed")],
)
def test_without_a_key_nothing_is_served(header: str | None, words: str) -> None:
    asked = AuthClient(KEYS.get)
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

    asked = AuthClient(KEYS.get)
    for key, status in (("s3cret", 500), ("wrong", 401)):
        headers = {**FORM, "Authorization": f"Bearer {key}"}
        answer = asked.request("POST", "/v1/videos", content=never(), headers=headers)
        assert answer.status_code == status


def test_the_uploads_of_one_key_leave_places_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The uploads of one key are limited, so other keys can upload.

    A client of /v1/videos/sync that waits for its clip does not count as an upload.
    """
    monkeypatch.setattr(middleware_module, "MAX_UPLOADS", 4)
    monkeypatch.setattr(middleware_module, "MAX_UPLOADS_PER_KEY", 2)
    gate = asyncio.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].endswith("/sync"):
            scope["state"]["upload"].close()
        if scope["state"]["owner"].name == "alice":
            await gate.wait()
        await echo(scope, receive, send)

    asked = AuthClient(KEYS.get, waits)

    def post(key: str, path: str = "/v1/videos") -> Awaitable[httpx.Response]:
        headers = {**FORM, "Authorization": f"Bearer {key}"}
        return asked.client.post(path, content=b"x", headers=headers)

    async def ask() -> list[int]:
        paths = ["/v1/videos/sync"] * 3 + ["/v1/videos"] * 2
        held = [asyncio.ensure_future(post("s3cret", path)) for path in paths]
        await asyncio.sleep(0)  # let all requests begin
        refused, other = await post("s3cret"), await post("other")
        assert "2 images of this key" in refused.json()["error"]["message"]
        gate.set()
        answers = [refused, other, *[await each for each in held], await post("s3cret")]
        return [answer.status_code for answer in answers]

    assert asyncio.run(ask()) == [429] + [200] * 7


def test_an_error_in_a_route_is_answered() -> None:
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/v1/videos")
    def broken() -> None:
        raise KeyError("secret detail")

    answer = AuthClient(app=app).get("/v1/videos")
    error_of(answer, 500, "internal_error")
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("expected", "hosts"),
    [
        (200, ("localhost", "LOCALHOST.", "127.0.0.1:8000", "127.9.9.9", "[::1]:9")),
        (403, ("0.0.0.0", "10.0.0.1", "", "::", "localhost.evil.example", "127.0.0.1.nip.io:80")),
        (403, ("2130706433", "evil.example", "169.254.169.254")),
    ],
)
def test_without_keys_only_names_of_this_machine_are_served(
    expected: int, hosts: tuple[str, ...]
) -> None:
    for host in hosts:
        for method, path in (("GET", "/v1/videos"), ("POST", "/v1/videos"), ("GET", "/")):
            for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}):
                answer = AuthClient().request(method, path, headers={**FORM, **headers})
                assert answer.status_code == expected
                assert expected == 200 or answer.json()["error"]["code"] == "wrong_host"


@pytest.mark.parametrize("origin", ["http://evil.example", "null"])
def test_without_keys_pages_of_other_hosts_are_refused(origin: str) -> None:
    answer = AuthClient().get("/v1/videos", {"Origin": origin})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_origin")


def test_routes_have_few_names() -> None:
    """Unknown paths and methods are all counted as `other`.

    Otherwise a client could create any number of metric series with invented paths.
    """
    asked = AuthClient()
    for number in range(20):
        asked.request(f"MADE{number}", f"/made/up/{number}")
    assert set(asked.requests) == {("other", "other", 200)}


# --- the file of keys ----------------------------------------------------------------------------

HASH = "0123456789abcdef" * 4


def put(folder: Path, text: str | bytes) -> Path:
    path = folder / "keys"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(0o600)
    return path


def test_a_new_key_is_accepted_by_its_hash(tmp_path: Path) -> None:
    (first, first_hash), (second, second_hash) = new_key(), new_key()
    text = f"# who: when\n\nann {first_hash} open=5\n  bob.2@home\t{second_hash}\r\n"
    found = read_keys(put(tmp_path, text))
    assert found.find_owner(first) == Owner("ann", 5)
    assert found.find_owner(second) == Owner("bob.2@home", None)
    assert first_hash == hashlib.sha256(first.encode()).hexdigest()
    # A key is random, and 43 characters of 6 bits hold its 256 bits.
    assert first != second
    assert len(first) == len(second) == len("svdpp_") + 43
    for wrong in ("", "svdpp_", "ann", "\ud800", "\0", "x" * 10**6, first[:-1], first_hash):
        assert found.find_owner(wrong) is None


def test_every_key_is_compared_in_constant_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [new_key() for _ in range(3)]
    found = read_keys(put(tmp_path, "".join(f"n{i} {each[1]}\n" for i, each in enumerate(made))))
    compare = Mock()
    monkeypatch.setattr("hmac.compare_digest", compare)
    found.find_owner(made[0][0])
    assert [call.args[0] for call in compare.call_args_list] == [hash for _, hash in made]


@pytest.mark.parametrize("limits", [("open=2", ""), ("", "open=2"), ("open=9", "open=2")])
def test_an_owner_can_change_keys_without_a_gap(tmp_path: Path, limits: tuple[str, str]) -> None:
    (old, old_hash), (new, new_hash) = new_key(), new_key()
    found = read_keys(put(tmp_path, f"ann {old_hash} {limits[0]}\nann {new_hash} {limits[1]}\n"))
    assert found.find_owner(old) == found.find_owner(new) == Owner("ann", 2)


KEY = "svdpp_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"


@pytest.mark.parametrize(
    ("reason", "texts"),
    [
        ("has no entries", ("", "# none")),
        ("line 2 is not NAME HASH", (f"\n{KEY}\n", f"ann {HASH}\n{KEY} {KEY} {KEY}\n")),
        ("line 1 is not NAME HASH", (f"ann {KEY}\n", f"ann {HASH.upper()}\n", f"a/b {HASH}\n")),
        ("line 1 is not", (f"ann {HASH} open=0", f"ann {HASH} open=5 open=6", b"ann \xff\xfe")),
        ("has one hash under two names", (f"ann {HASH}\nbob {HASH}\n",)),
        ("is larger than", (f"# {'x' * 1_000_001}",)),
    ],
)
def test_a_wrong_file_is_refused_and_no_key_is_shown(
    tmp_path: Path, reason: str, texts: tuple[str | bytes, ...]
) -> None:
    for text in texts:
        path = put(tmp_path, text)
        with pytest.raises(InputError, match=reason) as refused:
            read_keys(path)
        assert repr(str(path)) in refused.value.message
        assert KEY not in f"{refused.value.message} {refused.value.hint} {refused.value.__cause__}"


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (OutOfMemoryError, 422, "too_large_for_memory"),
        (DecoderBusyError, 503, "decoder_busy"),
        (RankError, 500, "internal_error"),
    ],
)
def test_status_and_code(kind: type[SvdppError], status: int, code: str) -> None:
    found = to_api_error(kind("x"))
    assert (found.status, found.code) == (status, code)
    assert ("Retry-After" in found.headers) == (status == 503)


def test_an_error_names_no_folder_of_the_server_and_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = {
        "type": "InputError",
        "message": "cannot read '/srv/my data/photos/video_1.png': it changed",
        "hint": "see /srv/my-data/log",
        "details": {"path": "/srv/my data/photos/video_1.png", "steps": [3, "~/data/clips/a.mp4"]},
    }
    body = error_body(record)
    assert body.message == "cannot read 'video_1.png': it changed"
    assert body.hint == "see log"
    assert body.details == {"path": "video_1.png", "steps": [3, "a.mp4"]}
    monkeypatch.setenv("HF_TOKEN", "a-secret-of-the-hub")
    error = to_api_error(RankError(record["message"], details={"why": "a-secret-of-the-hub"}))
    answer = json.loads(bytes(error_response(error).body))["error"]
    assert (answer["message"], answer["details"]) == (body.message, {"why": "***"})
    away = to_api_error(OutputError("the queue '/srv/data/queue.sqlite3' cannot be used"))
    assert away.message == "the server cannot store its data"


def test_messages_name_fields_of_requests_and_no_options() -> None:
    numbers = {"flow_shift": 0, "steps": 7}
    raised = RequestError("`flow_shift` is 0", "use `num_inference_steps` 4", details=numbers)
    error = to_api_error(raised)
    assert (error.message, error.hint) == ("flow_shift is 0", "use steps 4")
    # A client cannot change `split`, so the hint is left out.
    assert to_api_error(RequestError("7 steps", "use `split` balanced", details=numbers)).hint == ""
