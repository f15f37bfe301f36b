"""Real `svdpp serve`, in a new process or in the test's process, with an HTTP client."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from loguru import logger

from svdpp.cli.progress import EventLog
from svdpp.errors import Interrupted
from svdpp.media.inputs import example_images
from svdpp.serve.auth import Keys
from svdpp.serve.server import Server, build
from svdpp.serve.settings import ServerSettings
from tests.support.shell import PYTHONPATH, svdpp_here

#: Options of a model whose steps only sleep, so that tests do not depend on the machine's speed.
DUMMY = ("--model", "dummy", "--device", "cpu", "--world", "2", "--threads", "1", "--steps", "8")
#: Options of a dummy model whose steps take about 10 ms.
QUICK = (*DUMMY, "--time-scale", "0.02")
DEMO = ("--model", "demo", "--device", "cpu", "--world", "2", "--threads", "1", "--steps", "2")
PHOTO = example_images()[0].read_bytes()

#: Timeout in seconds for operations that take this long only if something hangs.
HANG_SECONDS = 300.0


class HttpServer:
    """Process of `svdpp serve --data folder` during a block, with an HTTP client for it.

    `launcher` has the arguments of Python that precede the command's own arguments.
    """

    def __init__(
        self, folder: Path, *options: str, key: str | None = None, launcher: tuple[str, ...] = ()
    ) -> None:
        self.folder = folder
        self.err = self.other_key = ""
        command = ("-m", "svdpp", "serve", "--port", "0", "--data", str(folder), *options)
        self.process = subprocess.Popen(
            [sys.executable, *launcher, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": PYTHONPATH, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
            text=True,
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            wait(lambda: self._url or self.process.poll() is not None, lambda: self.err)
            assert self._url, self.err
        except BaseException:
            self.process.kill()
            raise
        self._connect(self._url, key)

    def _connect(self, url: str, key: str | None) -> None:
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=HANG_SECONDS, trust_env=False)
        if key is not None:
            self.client.headers["Authorization"] = f"Bearer {key}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.err += line

    @property
    def _url(self) -> str:
        match = re.search(r"starting .* at (http://\S+) with", self.err)
        return "" if match is None else match[1]

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.stop()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the server's process, wait for its end, and return its exit code."""
        self.process.send_signal(number)
        try:
            code = self.process.wait(HANG_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise
        self._reader.join(HANG_SECONDS)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def wait_ready(self) -> None:
        """Wait until the server's ranks are ready, and the server has printed that they are."""
        wait(lambda: self.client.get("/ready").status_code == 200, lambda: self.err)
        wait(lambda: "ready to make clips\n" in self.err, lambda: self.err)

    def request(
        self, *, photo: bytes | None = PHOTO, name: str = "sea.jpg", **form: Any
    ) -> httpx.Response:
        """Request a clip of the server by an HTTP form, and return the response.

        With `photo=None`, the form has no image. A list is sent as several fields of the same name.
        """
        headers = {"Idempotency-Key": key} if (key := form.pop("key", None)) else {}
        # All fields are sent as files, because httpx sends a multipart form only if there are
        # files.
        files: list[tuple[str, Any]] = [
            (field, each if isinstance(each, tuple) else (None, str(each)))
            for field, value in form.items()
            for each in (value if isinstance(value, list) else [value])
        ]
        if photo is not None:
            files.append(("input_reference", (name, photo)))
        return self.client.post("/v1/videos", files=files, headers=headers)

    def add(self, number: int = 1, **form: Any) -> list[str]:
        """Request clips of the server, and return their ids."""
        ids = []
        for _ in range(number):
            answer = self.request(**form)
            assert answer.status_code == 202, answer.text
            ids.append(answer.json()["id"])
        return ids

    def video(self, id: str) -> dict[str, Any]:
        answer = self.client.get(f"/v1/videos/{id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def all_ids(self) -> list[str]:
        """Return the ids of all clips that the client can see, the oldest first."""
        ids: list[str] = []
        after = ""
        while True:
            page = self.client.get(f"/v1/videos?limit=7&order=asc{after}").json()
            ids += [video["id"] for video in page["data"]]
            if not page["has_more"]:
                return ids
            after = f"&after={page['last_id']}"

    def wait_for(self, id: str, status: str) -> dict[str, Any]:
        """Wait until the status of a server's clip is `status`, and return the clip's JSON."""

        def has_status() -> bool:
            found = self.video(id)
            assert found["status"] in (status, "queued", "in_progress"), found
            return bool(found["status"] == status)

        wait(has_status, lambda: f"{self.video(id)}\n{self.err}")
        return self.video(id)

    def connected(self) -> socket.socket:
        url = httpx.URL(self.url)
        return socket.create_connection((url.host, url.port or 0), timeout=HANG_SECONDS)

    def raw(self, text: bytes) -> bytes:
        """Send bytes to the server's port, and return all bytes of its response."""
        with self.connected() as connection:
            found = b""
            # The server responded and closed the connection before it read all bytes.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(text)
            with suppress(ConnectionResetError):
                while part := connection.recv(65536):
                    found += part
        return found

    def form_schema(self) -> dict[str, Any]:
        """Return the OpenAPI schema of the form that requests a clip."""
        document = self.client.get("/openapi.json").json()
        kinds = document["paths"]["/v1/videos"]["post"]["requestBody"]["content"]
        form: dict[str, Any] = kinds["multipart/form-data"]["schema"]
        return form

    @contextmanager
    def events(self, id: str, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
        """Yield an iterator of the server-sent events of a clip; each event has its id and data."""
        with self.client.stream("GET", f"/v1/videos/{id}/events", headers=headers) as answer:
            assert answer.status_code == 200, answer.read()
            yield self._events(answer.iter_lines())

    def _events(self, lines: Iterator[str]) -> Iterator[dict[str, Any]]:
        found: dict[str, Any] = {}
        for line in lines:
            if not line and found:
                yield {**json.loads(found["data"]), "event_id": found["id"]}
                found = {}
            elif not line.startswith(":") and line:
                name, _, value = line.partition(": ")
                found[name] = value


class ServerHere(HttpServer):
    """Server of `svdpp serve` in the test's own process, which starts fast, with an HTTP client.

    It cannot be killed. Its log is in `err`.
    """

    def __init__(
        self, folder: Path, *options: str, key: str | None = None, port: int = 0, grace: float = 0
    ) -> None:
        self.folder = folder
        self.err = self.other_key = ""
        settings, keys = asked(folder, *options)
        self._sink = logger.add(self._note, level="INFO", format="{level} {message}")
        app, self.service = build(settings, keys)
        self.service.engine.observe(EventLog(settings.config.layout, self.service.engine.name_of))
        self._bound = socket.create_server(("127.0.0.1", port))
        is_listening = threading.Event()
        self._server = _UnsignalledServer(
            app,
            self.service,
            self._bound,
            grace_seconds=grace,
            on_listening=is_listening.set,
            on_ready=lambda: self._note("ready to make clips\n"),
        )
        self._switch_seconds = sys.getswitchinterval()
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait(lambda: is_listening.is_set() or not self._thread.is_alive(), lambda: self.err)
        assert is_listening.is_set(), self.err
        self._connect(f"http://127.0.0.1:{self._bound.getsockname()[1]}", key)

    def _note(self, text: str) -> None:
        self.err += text

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self._thread.is_alive():
            self.stop()

    def stop(self, number: int = 0) -> int:  # noqa: ARG002
        self._server._ending.set()
        self._thread.join(HANG_SECONDS)
        assert not self._thread.is_alive()
        self._bound.close()
        with suppress(ValueError):  # raised if a command has replaced all log sinks meanwhile
            logger.remove(self._sink)
        # Restore what the start of the server has changed in this process.
        sys.setswitchinterval(self._switch_seconds)
        gc.unfreeze()
        return 0


class _UnsignalledServer(Server):
    def _catch_signals(self) -> None:
        """Stand-in that catches no signals, because only the main thread can install handlers."""


def asked(folder: Path, *options: str) -> tuple[ServerSettings, Keys | None]:
    """Return the `ServerSettings` and API keys that a command line of `svdpp serve` leads to."""
    found: list[tuple[ServerSettings, Keys | None]] = []

    def end(settings: ServerSettings, keys: Keys | None) -> None:
        found.append((settings, keys))
        raise Interrupted(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("svdpp.serve.server.build", end)
        answer = svdpp_here("serve", "--port", "0", "--data", str(folder), *options)
    assert found, answer
    return found[0]


def wait(happens: Callable[[], object], said: Callable[[], str] = lambda: "") -> None:
    """Wait until `happens()` is true. If that takes too long, fail the test with `said()`."""
    end = time.monotonic() + HANG_SECONDS
    while not happens():
        assert time.monotonic() < end, said()
        time.sleep(0.05)


def error_of(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Check that an HTTP response is an error with a status and a code, and return the error."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"type", "code", "message", "hint", "details"}
    assert error["code"] == code, error
    assert error["message"]
    return error
