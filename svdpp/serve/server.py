"""The server process: its start, the socket, the signals, and the order in which parts end."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import resource
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import FrameType

import uvicorn
from loguru import logger
from starlette.types import ASGIApp

from svdpp.config import PipelineConfig
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import resolved_for
from svdpp.launch.process_lifetime import exit_with_signal_code
from svdpp.media import video
from svdpp.serve.app import create_app
from svdpp.serve.auth import Keys
from svdpp.serve.background import Background
from svdpp.serve.clips import Admission
from svdpp.serve.form import Capabilities
from svdpp.serve.job import Job
from svdpp.serve.queue import JobQueue
from svdpp.serve.retention import LOOK_SECONDS, set_strangers_aside, sweep
from svdpp.serve.service import ServerSettings, Service
from svdpp.serve.store import FileStore

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_BACKLOG = 512
_KEEP_ALIVE_SECONDS = 15
# For answers that are being sent when the last clip is finished.
_SHUTDOWN_SECONDS = 5
_SWEEP_SECONDS = 60.0
# For each thread; what it does may not answer, such as a store.
_END_SECONDS = 30.0
_MAX_FILES = 16384
_MAX_SHAPES = 256
# A request changes threads several times, and each time waits so long for a thread that computes,
# such as the ETAs of a long queue.
_SWITCH_SECONDS = 0.0005


def check_config(config: PipelineConfig, sizes: Iterable[tuple[int, int]] = ()) -> PipelineConfig:
    """Checks what could keep the ranks from starting; returns `config`, resolved.

    `sizes` are width and height of other frames that clients may request.
    """
    pipeline = Pipeline(config)
    config, checkpoint = pipeline.config, pipeline.checkpoint
    for width, height in sizes:
        resolved_for(replace(config.sampling, width=width, height=height), config, checkpoint)
    pipeline.check_memory()
    if not config.model.is_dummy:
        video.find_ffmpeg()
    return config


def build(settings: ServerSettings, keys: Keys | None) -> tuple[ASGIApp, Service]:
    """The application and its service, by a config of `check_config`; nothing is started."""
    queue = JobQueue(
        settings.folder.absolute(),
        adopts=settings.adopts,
        url=settings.queue_url,
        store=FileStore(settings.folder, settings.store_url),
        lease_seconds=settings.lease_seconds,
    )
    try:
        service = Service(settings, queue)
        if not queue.is_shared:
            queue.recover()
        set_strangers_aside(queue, service.folder)
        hold(queue, service.capabilities, service.admission)
    except BaseException:
        queue.close()
        raise
    return create_app(service, owner_of=None if keys is None else keys.find), service


def hold(queue: JobQueue, capabilities: Capabilities, admission: Admission) -> None:
    """Holds the jobs of earlier servers that this one would make by another model, or cannot make.

    They keep their places, and go on at the start of a server that can make them. In a queue that
    is shared, another server may make them.
    """
    why_no_route = functools.lru_cache(_MAX_SHAPES)(admission.why_no_route)
    own, weights = capabilities.model, capabilities.weights

    def why_not(job: Job) -> str | None:
        if (job.weights or job.model) == (weights or own):
            return why_no_route(job.sampling)
        other = "other weights of it" if job.model == own else own
        return f"its model is {job.model}, and this server runs {other}"

    if queue.is_shared:
        queue.kind, queue.why_not = weights or own, why_not
        return
    for reason, number in Counter(queue.hold(why_not)).items():
        logger.warning("queued clips that wait for another start: {}; of one, {}", number, reason)


class Server:
    """Serves `app` until a signal, then ends all parts in order.

    The first SIGTERM, SIGINT or SIGHUP refuses new jobs and lets the ranks finish or checkpoint
    what they do, while clients still read. The second one ends the process at once. `service` is
    started and closed here; `on_listening` is called once requests are accepted, `on_ready` each
    time that the ranks become ready.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        bound: socket.socket,
        *,
        grace_seconds: float,
        on_listening: Callable[[], None] = lambda: None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._service = service
        self._bound = bound
        self._grace = grace_seconds
        self._ending = threading.Event()
        self._on_listening = on_listening
        self._on_ready = on_ready
        self._http = _Http(app)
        self._look_at = 0.0
        store, publish = service.queue.store, service.engine.to_request.publish
        why = "latent checkpoints are not put into the store"
        threads = {
            service.webhooks.background: bool(service.settings.callback_hosts),
            service.fleet.background: service.queue.is_shared,
            service.prover.background: True,
            Background(
                "retention", self._sweep, _SWEEP_SECONDS, failure="old files cannot be removed"
            ): True,
            Background("store", publish, 1.0, failure=why): store.is_remote,
        }
        self._threads = [background for background, is_needed in threads.items() if is_needed]

    def run(self) -> None:
        """Serves until a signal, or until the engine gives up, and raises why."""
        _allow_connections()
        sys.setswitchinterval(_SWITCH_SECONDS)
        # A garbage collection stops all threads, and would visit every object of torch each time.
        gc.collect()
        gc.freeze()
        with self._signals():
            self._service.engine.start()
            for background in self._threads:
                background.start()
            watch = threading.Thread(target=self._watch, name="watch", daemon=True)
            watch.start()
            try:
                self._bound.listen(_BACKLOG)
                self._on_listening()
                self._http.run([self._bound])
            finally:
                self._ending.set()
                watch.join()
                self._service.queue.close()
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
        was_ready = False
        while not self._ending.wait(0.5) and self._service.engine.fatal is None:
            is_ready = self._service.engine.state == "ready"
            if is_ready and not was_ready:
                self._on_ready()
            was_ready = is_ready
        self._service.is_closing = True
        try:
            # What ranks finish without a queue cannot be recorded.
            grace = self._grace if self._service.queue.database.is_there else 0.0
            logger.info("ending: {:g} s for the clips in progress", grace)
            self._service.engine.close(grace)
            for background in self._threads:
                background.close(_END_SECONDS)
            self._service.followers.close()
        finally:
            self._http.should_exit = True

    def _sweep(self) -> None:
        """Removes leftovers, and jobs that are too old or too large."""
        service = self._service
        if time.monotonic() >= self._look_at:
            service.remove_leftovers()
            self._look_at = time.monotonic() + LOOK_SECONDS
        limits = (service.settings.keep_seconds, service.settings.keep_bytes)
        if limits != (None, None):
            sweep(service.queue, service.folder, time.time(), *limits)


def _allow_connections() -> None:
    """Raises the limit of open files, which is often 1024, to what an administrator allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _MAX_FILES:  # infinity is negative
        most = _MAX_FILES if hard < 0 else min(hard, _MAX_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


class _Http(uvicorn.Server):
    def __init__(self, app: ASGIApp) -> None:
        # Its records go where all others go, not to a format of its own.
        logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            app,
            http="h11",
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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals to `Server`."""
        yield
