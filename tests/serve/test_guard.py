"""What stands around every route, without a server: keys, limits of a body, hosts, errors."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from svdpp.errors import (
    ClosedError,
    InputError,
    OutOfMemoryError,
    OutputError,
    RankError,
    RequestError,
    SvdppError,
)
from svdpp.serve import guard as guard_module
from svdpp.serve.auth import Owner, new_key, read_keys
from svdpp.serve.guard import Guard
from svdpp.serve.photos import DecoderBusyError
from svdpp.serve.views import (
    ApiError,
    as_api_error,
    error_answer,
    error_body,
    install_error_handlers,
)
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


def test_the_uploads_of_one_key_leave_places_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that waits for its clip is no upload."""
    monkeypatch.setattr(guard_module, "UPLOADS", 4)
    monkeypatch.setattr(guard_module, "UPLOADS_OF_KEY", 2)
    gate = asyncio.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].endswith("/sync"):
            scope["state"]["upload"].close()
        if scope["state"]["owner"].name == "alice":
            await gate.wait()
        await echo(scope, receive, send)

    transport = httpx.ASGITransport(guarded(waits, owner_of=KEYS.get))

    async def ask() -> list[int]:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def post(key: str, path: str = "/v1/videos") -> httpx.Response:
                headers = {**FORM, "Authorization": f"Bearer {key}"}
                return await client.post(path, content=b"x", headers=headers)

            paths = ["/v1/videos/sync"] * 3 + ["/v1/videos"] * 2
            held = [asyncio.ensure_future(post("s3cret", path)) for path in paths]
            await asyncio.sleep(0)  # all begin before what follows
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


# --- the file of keys ----------------------------------------------------------------------------

HASH = "0123456789abcdef" * 4


def put(folder: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def test_a_new_key_is_accepted_by_its_hash(tmp_path: Path) -> None:
    (first, first_hash), (second, second_hash) = new_key(), new_key()
    path = put(tmp_path, f"# who: when\n\nann {first_hash} open=5\n  bob.2@home\t{second_hash}\r\n")
    found = read_keys(path)
    assert found.find(first) == Owner("ann", 5)
    assert found.find(second) == Owner("bob.2@home", None)
    assert first not in path.read_text()
    assert first_hash == hashlib.sha256(first.encode()).hexdigest()
    # 43 characters of 6 bits hold 256 bits.
    assert first[6:] != second[6:]
    assert [len(key.removeprefix("svdpp_")) for key in (first, second)] == [43, 43]


@pytest.mark.parametrize(
    "wrong",
    ["", " ", "svdpp_", HASH, "ann", "\ud800", "\0", "é" * 40, "x" * 10**6],
    ids=lambda wrong: ascii(wrong[:10]),
)
def test_a_wrong_key_is_no_key(tmp_path: Path, wrong: str) -> None:
    key, hash = new_key()
    found = read_keys(put(tmp_path, f"ann {hash}\nbob {HASH}\n"))
    for each in (wrong, key[:-1], key + " ", key.upper(), hash):
        assert found.find(each) is None


def test_every_key_is_compared_in_constant_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [new_key() for _ in range(3)]
    found = read_keys(put(tmp_path, "".join(f"n{i} {each[1]}\n" for i, each in enumerate(made))))
    compared: list[str] = []
    real = hmac.compare_digest

    def compare(one: str, other: str) -> bool:
        compared.append(one)
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in (made[0][0], made[2][0], "wrong"):
        compared.clear()
        found.find(key)
        assert compared == [hash for _, hash in made]


@pytest.mark.parametrize("limits", [("open=2", ""), ("", "open=2"), ("open=9", "open=2")])
def test_an_owner_can_change_keys_without_a_gap(tmp_path: Path, limits: tuple[str, str]) -> None:
    (old, old_hash), (new, new_hash) = new_key(), new_key()
    found = read_keys(put(tmp_path, f"ann {old_hash} {limits[0]}\nann {new_hash} {limits[1]}\n"))
    for key in (old, new):
        owner = found.find(key)
        assert owner is not None
        assert (owner.name, owner.max_open) == ("ann", 2)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o644, 0o666])
def test_a_file_that_others_may_open_is_refused_by_name(tmp_path: Path, mode: int) -> None:
    path = put(tmp_path, f"ann {HASH}\n", mode)
    with pytest.raises(RequestError) as refused:
        read_keys(path)
    assert repr(str(path)) in refused.value.message
    assert f"{mode:04o}" in refused.value.message
    assert refused.value.hint.startswith("chmod 600")
    path.chmod(0o640)
    assert read_keys(path)


KEY = "svdpp_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no entries"),
        (f"ann {KEY}\n", "line 1: it is not NAME HASH"),
        (f"\n{KEY}\n", "line 2: it is not NAME HASH"),
        (f"{KEY} {KEY} {KEY}\n", "line 1: it is not NAME HASH"),
        (f"ann {HASH.upper()}\n", "line 1: it is not NAME HASH"),
        (f"a/b {HASH}\n", "line 1: it is not NAME HASH"),
        (f"ann {HASH} open=0\n", "line 1: it is not NAME HASH"),
        (f"ann {HASH} closed=5\n", "line 1: it is not NAME HASH"),
        (f"ann {HASH} open=5 open=6\n", "line 1: it is not NAME HASH"),
        (b"ann \xff\xfe", "line 1: it is not NAME HASH"),
        (f"# {'x' * 1_000_001}", "is larger than"),
    ],
)
def test_a_wrong_file_is_refused_and_no_key_is_shown(
    tmp_path: Path, text: str | bytes, reason: str
) -> None:
    path = put(tmp_path, text)
    with pytest.raises(InputError, match=reason) as refused:
        read_keys(path)
    assert repr(str(path)) in refused.value.message
    assert KEY not in refused.value.message + refused.value.hint
    assert refused.value.__cause__ is None or KEY not in str(refused.value.__cause__)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for path in (tmp_path / "none", tmp_path, Path("a\0b")):
        with pytest.raises(InputError, match="API key file"):
            read_keys(path)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("x"), 422, "invalid_request"),
        (InputError("x"), 422, "invalid_image"),
        (OutOfMemoryError("x"), 422, "too_large_for_memory"),
        (OutputError("x"), 503, "storage_failed"),
        (ClosedError("x"), 503, "closing"),
        (DecoderBusyError("x"), 503, "decoder_busy"),
        (RankError("x"), 500, "internal_error"),
        (ApiError(404, "video_not_found", "x"), 404, "video_not_found"),
    ],
    ids=repr,
)
def test_status_and_code(error: SvdppError, status: int, code: str) -> None:
    found = as_api_error(error)

    assert (found.status, found.code) == (status, code)
    assert ("Retry-After" in found.headers) == (status == 503)


def test_an_error_names_no_folder_of_the_server() -> None:
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
    assert as_api_error(RankError(record["message"])).message == body.message
    away = as_api_error(OutputError("the queue '/srv/data/queue.sqlite3' cannot be used"))
    assert away.message == "the server cannot store its data"


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        (
            ("--motion-bucket-id must be 0 to 9", "use --steps 4 or --frames 2"),
            ("motion_bucket_id must be 0 to 9", "use steps 4 or frames 2"),
        ),
        (("--param flow_shift is too large", ""), ("flow_shift is too large", "")),
        # What only whoever starts the server can do.
        (("7 steps cannot be divided", "use --split balanced"), ("7 steps cannot be divided", "")),
        (("too many pixels", "--max-megapixels 50"), ("too many pixels", "--max-megapixels 50")),
    ],
    ids=str,
)
def test_messages_name_fields_of_requests_and_no_options(
    raised: tuple[str, str], shown: tuple[str, str]
) -> None:
    error = as_api_error(RequestError(*raised))
    assert (error.message, error.hint) == shown


def test_an_answer_hides_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("HF_TOKEN", "a-secret-of-the-hub")
    error = RankError("'/home/alice/data' is full", details={"why": "a-secret-of-the-hub"})
    body = json.loads(bytes(error_answer(as_api_error(error)).body))

    assert body["error"]["message"] == "'data' is full"
    assert body["error"]["details"] == {"why": "***"}
    assert body["error"]["type"] == "server_error"
