"""Webhooks: signed, sent at least once with the same id, and only to allowed addresses."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import shutil
import signal
import socket
import sqlite3
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from svdpp.errors import RequestError
from svdpp.serve import webhooks
from svdpp.serve.job import JobState
from svdpp.serve.queue import JobQueue
from svdpp.serve.schemas import ApiError, video_from_job
from svdpp.serve.webhooks import Webhooks
from tests.support.engines import add, in_state, job_of, taken
from tests.support.http_server import HANG_SECONDS, QUICK, HttpServer, ServerHere, error_of, wait

OLD, NEW = (base64.b64encode(bytes([digit]) * 32).decode() for digit in (1, 2))
SECRETS = [base64.b64decode(secret) for secret in (OLD, NEW)]

Answer = Callable[[BaseHTTPRequestHandler], object]


class Receiver(ThreadingHTTPServer):
    """HTTP server that receives webhooks, and records the requests.

    The server responds with `answers` in order. All further requests get the last answer.
    """

    daemon_threads = True

    def __init__(self, *answers: Answer, tls: Path | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.answers = [*answers]
        self.requests: list[Request] = []
        self.host = f"127.0.0.1:{self.server_port}"
        self.url = f"http://{self.host}/hook?a=1"
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls)
            self.socket = context.wrap_socket(self.socket, server_side=True)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Ignore errors of a webhook's sender that disconnects, for example when killed."""


class Request(BaseHTTPRequestHandler):
    body = b""

    def do_POST(self) -> None:
        assert isinstance(self.server, Receiver)
        self.body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append(self)
        number = min(len(self.server.requests), len(self.server.answers))
        self.server.answers[number - 1](self)

    def log_message(self, *_: object) -> None:
        pass

    def verified_event(self, secret: str) -> dict[str, Any]:
        """Check a webhook's signature as Standard Webhooks tells receivers to; return the event."""
        id, sent_at = self.headers["webhook-id"], self.headers["webhook-timestamp"]
        assert abs(int(sent_at) - time.time()) < HANG_SECONDS
        content = f"{id}.{sent_at}.".encode() + self.body
        mac = hmac.digest(base64.b64decode(secret), content, hashlib.sha256)
        expected = "v1," + base64.b64encode(mac).decode()
        assert expected in self.headers["webhook-signature"].split(" ")
        event: dict[str, Any] = json.loads(self.body)
        assert event["id"] == id
        return event


def status(number: int, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(number)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()

    return answer


def close(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True


def no_response_after(event: threading.Event) -> Answer:
    """Return a handler of requests that waits for `event`, and then sends no response."""
    return lambda _: event.wait(HANG_SECONDS)


@contextmanager
def sending(store: JobQueue, *hosts: str) -> Iterator[Webhooks]:
    sender = Webhooks(store, hosts, SECRETS, video_from_job)
    sender.thread.start()
    try:
        yield sender
    finally:
        sender.thread.close()


def made(store: JobQueue, url: str, state: JobState = JobState.COMPLETED) -> str:
    return in_state(store, state, callback_url=url)


def callback(store: JobQueue, id: str) -> dict[str, Any]:
    shown = video_from_job(job_of(store, id)).callback
    assert shown is not None
    return shown


def wait_tried(store: JobQueue, id: str) -> dict[str, Any]:
    """Wait until a job's webhook is delivered or has failed; return the webhook as in the API."""

    def is_noted() -> bool:
        return callback(store, id)["error"] or callback(store, id)["status"] == "delivered"

    wait(is_noted, lambda: str(callback(store, id)))
    return callback(store, id)


def deliver_once(store: JobQueue, url: str, *hosts: str) -> dict[str, Any]:
    """Add a job, try to deliver its webhook once, and return the webhook as the API shows it."""
    id = made(store, url)
    with sending(store, *hosts):
        return wait_tried(store, id)


@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.FAILED])
def test_a_webhook_has_the_video_and_a_signature_of_each_secret(
    store: JobQueue, monkeypatch: pytest.MonkeyPatch, state: JobState
) -> None:
    """A webhook has the video, and a signature for each secret.

    After an error response or a broken connection, the same webhook is sent again.
    """
    monkeypatch.setattr(webhooks, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(webhooks, "_FIRST_RETRY_SECONDS", 0.01)
    with Receiver(status(404), close, status(204)) as receiver:
        id = made(store, receiver.url, state)
        job = job_of(store, id)
        with sending(store, receiver.host):
            wait(lambda: callback(store, id)["status"] == "delivered")
    shown = {"url": receiver.url, "status": "delivered", "attempts": 3, "error": None}
    assert callback(store, id) == shown
    _, _, request = receiver.requests
    assert len({request.verified_event(NEW)["id"] for request in receiver.requests}) == 1
    assert request.path == "/hook?a=1"
    assert request.headers["host"] == receiver.host
    assert request.headers["content-type"] == "application/json"
    event = request.verified_event(OLD)
    assert event == request.verified_event(NEW)
    data = event.pop("data")
    assert event == {
        "id": f"evt_{id.removeprefix('video_')}",
        "object": "event",
        "type": f"video.{state}",
        "created_at": int(job.finished_at or 0),
    }
    assert data.pop("callback")["status"] == "pending"
    assert data == video_from_job(job).model_dump(mode="json", exclude={"callback"})


def test_a_cancelled_clip_and_one_without_url_send_none(store: JobQueue) -> None:
    with Receiver(status(200)) as receiver, sending(store, receiver.host) as sender:
        cancelled = made(store, receiver.url, JobState.CANCELLED)
        without = in_state(store, JobState.COMPLETED)
        last = made(store, receiver.url)
        sender.thread.wake()
        wait_tried(store, last)
        assert [request.verified_event(NEW)["data"]["id"] for request in receiver.requests] == [
            last
        ]
    for id in (cancelled, without):
        assert video_from_job(job_of(store, id)).callback is None


def test_the_retries_take_twenty_hours_until_the_webhook_is_given_up(
    monkeypatch: pytest.MonkeyPatch, each_store: JobQueue, told: list[str]
) -> None:
    """The wait before a retry grows by a factor of four, up to six hours, by the database's clock.

    The host is not allowed, so the attempts fail without a connection.
    """
    store = each_store
    monkeypatch.setattr(webhooks, "_POLL_SECONDS", 0.01)
    expected = [5, 20, 80, 320, 1280, 5120, 20480, 21600, 21600]
    id = made(store, "http://other.example/")

    def asked(what: str) -> float:
        return float(store.backend.fetch_all(f"SELECT {what} FROM jobs")[0][0])

    before = asked("clock()")
    with sending(store, "127.0.0.1:1"):
        for seconds in expected:
            error = wait_tried(store, id)["error"]
            assert before + seconds <= asked("callback_due") <= asked("clock()") + seconds
            before = asked("clock()")
            with store.backend.transaction() as connection:
                connection.execute("UPDATE jobs SET callback_due = 0, callback_error = NULL")
        wait(lambda: told)
    assert callback(store, id)["status"] == "failed"
    assert callback(store, id)["attempts"] == webhooks.MAX_ATTEMPTS == len(expected) + 1
    assert told == [f"{id}: its webhook is given up: {error}"]
    assert "sends no webhooks to" in error
    assert store.claim_callback(0) is None
    assert round(sum(expected) / 3600) == 20


def test_a_webhook_is_tried_once_at_a_time_and_again_after_its_lease(each_store: JobQueue) -> None:
    store = each_store
    add(store, callback_url="http://a/")
    assert store.claim_callback(60) is None, "it waits"
    job = taken(store)
    assert store.claim_callback(60) is None, "it is in progress"
    store.complete(job.id, {}, job.fencing_token)
    first = store.claim_callback(0.01)
    assert first is not None
    assert (first.id, first.callback_attempts) == (job.id, 1)
    again: list[Any] = []
    wait(lambda: again.append(store.claim_callback(60)) or again[-1] is not None)
    assert again[-1].callback_attempts == 2
    assert store.claim_callback(60) is None
    assert not store.set_callback(first, None, None), "its second try has begun"
    assert store.set_callback(again[-1], None, None)
    assert store.claim_callback(0) is None


@pytest.mark.slow
def test_a_slow_receiver_holds_back_no_other(
    store: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "ATTEMPT_SECONDS", 3.0)
    go_on = threading.Event()
    with (
        Receiver(no_response_after(go_on)) as slow,
        Receiver(status(200)) as other,
        sending(store, slow.host, other.host) as sender,
    ):
        ids = [made(store, slow.url) for _ in range(3)] + [made(store, other.url)]
        sender.thread.wake()
        assert wait_tried(store, ids[-1])["status"] == "delivered"
        shown = wait_tried(store, ids[0])
        assert (shown["status"], shown["error"]) == ("pending", "no response within 3 s")
        go_on.set()


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example:81/",
        "http://hooks.example.other.example/",
        "http://hooks.example@other.example/",
        "http://other.example\\@hooks.example/",
        "http://me:word@hooks.example/",
        "http://[::1/",
    ],
)
def test_a_host_that_is_not_allowed_is_refused(store: JobQueue, url: str) -> None:
    sender = Webhooks(store, ["hooks.example", "127.0.0.1:8080"], SECRETS, video_from_job)
    for allowed in ("https://Hooks.example/a?b", "http://127.0.0.1:8080"):
        sender.check(allowed)
    with pytest.raises(RequestError, match="takes hosts such as"):
        Webhooks(store, ["https://hooks.example/"], SECRETS, video_from_job)
    with pytest.raises(ApiError, match="sends no webhooks to") as refused:
        sender.check(url)
    assert (refused.value.status, refused.value.code) == (422, "callback_refused")


def test_only_addresses_of_the_internet_are_public() -> None:
    private = (
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "100.64.0.1", "0.0.0.0"),
        *("169.254.169.254", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("::1", "::", "fe80::1", "fe80::1%1", "fc00::1", "fec0::1", "ff0e::1"),
        *("::ffff:127.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001::1"),
    )
    public = {"8.8.8.8", "2606:4700::1111"}
    assert set(filter(webhooks._is_public, [*private, *public])) == public


@pytest.mark.parametrize("second", ["127.0.0.1", "93.184.215.14"])
def test_all_addresses_of_a_name_are_checked_and_none_is_looked_up_again(
    store: JobQueue, monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    """All addresses of a host name are checked, and the name is looked up only once.

    A second look-up could give an unchecked address (DNS rebinding).
    """
    answers = [["93.184.215.15", second]] + [["127.0.0.1"]] * 9
    connected: list[str] = []

    def look_up(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        assert host == "hooks.example"
        return [(socket.AF_INET, 1, 6, "", (each, port)) for each in answers.pop(0)]

    async def connect(remote_host: str, **_: Any) -> None:
        connected.append(remote_host)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr("anyio.connect_tcp", connect)
    error = deliver_once(store, "http://hooks.example/", "hooks.example")["error"]
    assert len(answers) == 9
    refused = "hooks.example has an address that is not public"
    expected = {"127.0.0.1": ([], refused), "93.184.215.14": (["93.184.215.14"], "no network")}
    assert (connected, error) == expected[second]


def test_a_redirect_is_not_followed(store: JobQueue) -> None:
    with Receiver(status(200)) as other, Receiver() as receiver:
        receiver.answers.append(status(307, location=other.url))
        shown = deliver_once(store, receiver.url, receiver.host, other.host)
    assert shown["error"] == "the response was 307"
    assert len(receiver.requests) == 1
    assert other.requests == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
@pytest.mark.parametrize("is_trusted", [True, False])
def test_the_certificate_is_checked(
    store: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_trusted: bool
) -> None:
    certificate = tmp_path / "certificate.pem"
    made_by = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=a -addext"
    made_by += f" subjectAltName=IP:127.0.0.1 -keyout {certificate} -out {certificate}"
    subprocess.run(made_by.split(), check=True, capture_output=True)
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with Receiver(status(200), tls=certificate) as receiver:
        shown = deliver_once(store, receiver.url.replace("http:", "https:"), receiver.host)
    assert shown["status"] == ("delivered" if is_trusted else "pending"), shown
    assert is_trusted or "CERTIFICATE_VERIFY_FAILED" in shown["error"]
    assert len(receiver.requests) == is_trusted


@pytest.mark.slow
def test_a_server_that_is_killed_before_a_delivery_delivers_after_its_restart(
    tmp_path: Path,
) -> None:
    secrets, go_on = tmp_path / "secrets", threading.Event()
    secrets.touch(0o600)
    secrets.write_text(f"# of May\nwhsec_{OLD}\n\nwhsec_{NEW}\n")
    with Receiver(no_response_after(go_on), status(200)) as receiver:
        options = ("--callback-secret-file", str(secrets), "--callback-hosts", receiver.host)
        options = (*options, *QUICK)
        with HttpServer(tmp_path / "data", *options) as server:
            refused = server.request(callback_url="http://a.example/")
            error = error_of(refused, 422, "callback_refused")
            assert error["details"] == {"field": "callback_url"}
            error_of(server.request(callback_url="ftp://a.example/"), 422, "invalid_request")
            (id,) = server.add(callback_url=receiver.url)
            assert server.video(id)["callback"]["status"] == "pending"
            wait(lambda: receiver.requests, lambda: server.err)
            assert server.video(id)["status"] == "completed"
            server.stop(signal.SIGKILL)
        go_on.set()
        with closing(sqlite3.connect(tmp_path / "data/queue.sqlite3")) as database, database:
            database.execute("UPDATE jobs SET callback_due = 0")  # the attempt's lease expires
        with ServerHere(tmp_path / "data", *options) as here:
            wait(lambda: len(receiver.requests) == 2, lambda: here.err)
            wait(lambda: here.video(id)["callback"]["status"] == "delivered")
            shown = here.video(id)
        first, second = (request.verified_event(NEW) for request in receiver.requests)
        assert first["id"] == second["id"]
        assert second["type"] == "video.completed"
        assert second["data"].pop("callback") == {**shown.pop("callback"), "status": "pending"}
        assert second["data"] == shown
        assert os.fsencode(OLD) not in (tmp_path / "data/queue.sqlite3").read_bytes()


@pytest.mark.slow
def test_a_resolver_that_does_not_answer_delays_only_its_own_host(
    store: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host whose name look-up hangs delays only its own webhooks.

    Nothing waits for hanging look-ups, and only a few of them run at a time.
    """
    monkeypatch.setattr(webhooks, "ATTEMPT_SECONDS", 3.0)
    look_up, may_end, asked = socket.getaddrinfo, threading.Event(), list[str]()

    def dead(host: Any, *values: Any, **more: Any) -> Any:
        if host != "dead.example":
            return look_up(host, *values, **more)
        asked.append(host)
        may_end.wait(30.0)
        raise socket.gaierror("no resolver")

    monkeypatch.setattr(socket, "getaddrinfo", dead)
    with Receiver(status(204)) as receiver:
        waiting = [made(store, "http://dead.example/x") for _ in range(webhooks.MAX_CONCURRENT)]
        id = made(store, receiver.url)
        start = time.monotonic()
        with sending(store, receiver.host, "dead.example"):
            wait(lambda: callback(store, id)["status"] == "delivered")
            assert time.monotonic() - start < 20, "the others wait for the resolver"
            wait(lambda: all(callback(store, each)["attempts"] for each in waiting))
            assert len(asked) == webhooks._MAX_LOOKUPS
            may_end.set()
