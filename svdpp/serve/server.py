"""The server process: the socket, the signals, and the order in which all parts end."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import h11
import uvicorn
from loguru import logger
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from svdpp.errors import OutputError
from svdpp.launch.process_lifetime import exit_with_signal_code
from svdpp.serve.retention import sweep
from svdpp.serve.service import Service

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_BACKLOG = 512
_KEEP_ALIVE_SECONDS = 15
# For answers that are being sent when the last clip is finished.
_SHUTDOWN_SECONDS = 5
_SWEEP_SECONDS = 60.0
_MAX_FILES = 16384
# A request changes threads several times, and each time waits so long for a thread that computes,
# such as the ETAs of a long queue.
_SWITCH_SECONDS = 0.0005


@dataclass(frozen=True, kw_only=True)
class Retention:
    """When finished jobs are removed, rows and files together; None: never.

    Args:
        age_seconds: since they reached a final state.
        num_bytes: of the files of all jobs.
    """

    age_seconds: float | None = None
    num_bytes: int | None = None


class Server:
    """Serves `app` until a signal, then ends all parts in order.

    The first SIGTERM, SIGINT or SIGHUP refuses new jobs and lets the ranks finish or checkpoint
    what they do, while clients still read. The second one ends the process at once. `service` is
    started and closed here; `on_listening` is called once requests are accepted.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        bound: socket.socket,
        *,
        grace_seconds: float,
        retention: Retention,
        on_listening: Callable[[], None] = lambda: None,
    ) -> None:
        self._service = service
        self._bound = bound
        self._grace = grace_seconds
        self._retention = retention
        self._ending = threading.Event()
        self._http = _Http(app, on_listening)
        self._end_begun = False

    def run(self) -> None:
        """Serves until a signal, or until the engine gives up, and raises why."""
        _allow_connections()
        sys.setswitchinterval(_SWITCH_SECONDS)
        # A garbage collection stops all threads, and would visit every object of torch each time.
        gc.collect()
        gc.freeze()
        with self._signals():
            for part in (self._watch, self._keep_in_limits):
                threading.Thread(target=part, name=part.__name__, daemon=True).start()
            self._service.engine.start()
            self._service.prover.start()
            try:
                self._http.run([self._bound])
            finally:
                self._end()
        if self._service.engine.fatal is not None:
            raise self._service.engine.fatal

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._ending.is_set():
            exit_with_signal_code(number)
        self._ending.set()

    def _watch(self) -> None:
        """Waits for a signal or for the end of the engine, then ends what makes clips."""
        while not self._ending.wait(0.5) and self._service.engine.fatal is None:
            pass
        self._service.is_closing = True
        try:
            self._end_work()
        finally:
            self._http.should_exit = True

    def _end_work(self) -> None:
        if self._end_begun:
            return
        self._end_begun = True
        logger.info("ending: {:g} s for the clips in progress", self._grace)
        self._service.engine.close(self._grace)
        self._service.prover.close()
        self._service.has_ended = True
        self._service.events.close()

    def _end(self) -> None:
        self._ending.set()
        self._end_work()
        self._service.queue.close()

    def _keep_in_limits(self) -> None:
        """Removes finished jobs that are too old or too large, from time to time."""
        limits = self._retention
        if limits == Retention():
            return
        service = self._service
        while not self._ending.wait(_SWEEP_SECONDS if self._http.started else 1.0):
            try:
                now, folder = time.time(), service.folder
                for id in sweep(service.queue, folder, now, limits.age_seconds, limits.num_bytes):
                    service.events.forget(id)
            except OutputError as error:
                logger.error("old clips cannot be removed: {}", error)


def _allow_connections() -> None:
    """Raises the limit of open files, which is often 1024, to what an administrator allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Http(uvicorn.Server):
    """uvicorn without its own handling of signals."""

    def __init__(self, app: ASGIApp, on_listening: Callable[[], None]) -> None:
        # Its records go where all others go, not to a format of its own.
        logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            log_level=logging.CRITICAL,
            backlog=_BACKLOG,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        super().__init__(config)
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals to `Server`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen."""
        await super().startup(sockets)
        if self.started:
            self._on_listening()


class _Protocol(H11Protocol):
    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP by the API's shape of errors."""
        body = {"type": "invalid_request_error", "code": "invalid_http", "message": msg}
        text = json.dumps({"error": {**body, "hint": "", "details": {}}}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(text)).encode()),
            (b"connection", b"close"),
        ]
        with contextlib.suppress(h11.LocalProtocolError):  # in the middle of an answer
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=text),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
