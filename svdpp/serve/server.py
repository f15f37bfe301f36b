"""HTTP server: creation of the application, start, signals, and ordered shutdown."""

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from loguru import logger
from starlette.types import ASGIApp

from svdpp import __version__
from svdpp.config import PipelineConfig
from svdpp.driver.pipeline import Pipeline
from svdpp.launch.process_lifetime import exit_with_signal_code
from svdpp.media.ffmpeg import find_ffmpeg
from svdpp.serve import batch_routes, routes
from svdpp.serve.auth import Keys
from svdpp.serve.batch_lines import MAX_LINES
from svdpp.serve.clock import SteadyClock
from svdpp.serve.middleware import MAX_BATCH_BYTES, MAX_JSON_BYTES, AuthMiddleware
from svdpp.serve.periodic_thread import PeriodicThread
from svdpp.serve.queue import JobQueue
from svdpp.serve.retention import ORPHAN_SCAN_SECONDS, enforce_retention, move_orphans_aside
from svdpp.serve.routes import OwnerDep, ServiceDep
from svdpp.serve.schemas import ErrorResponse, install_error_handlers
from svdpp.serve.service import Service
from svdpp.serve.settings import ServerSettings
from svdpp.serve.store import FileStore
from svdpp.worker.routes import resolve_clip_config

_BACKLOG = 512
_KEEP_ALIVE_SECONDS = 15
# Seconds for finishing responses during shutdown. If a thousand clients follow clips, the last of
# them gets its final event after five seconds.
_SHUTDOWN_SECONDS = 6
# Seconds between two searches for jobs that exceed the limits on age and on total size.
_SWEEP_SECONDS = 60.0
# Maximum seconds to wait for the end of each thread, which may hang in a call to the store.
_END_SECONDS = 30.0
# Python's thread switch interval in seconds, set to a short value. A request passes between threads
# several times. Each time, the request waits this long if another thread is busy, e.g. with ETAs.
_SWITCH_SECONDS = 0.0005


def check_config(config: PipelineConfig, sizes: Iterable[tuple[int, int]] = ()) -> PipelineConfig:
    """Resolve a server's configuration, and raise an error unless the ranks can start with it.

    For example, the checkpoint must exist, the model must be able to make all frame sizes, and the
    clips must fit in the memory of the devices.

    Args:
        config: Configuration of the pipeline.
        sizes: Further frame sizes to check, each width and height in pixels.
    """
    pipeline = Pipeline(config)
    config, checkpoint = pipeline.config, pipeline.checkpoint
    for width, height in sizes:
        resolve_clip_config(
            replace(config.sampling, width=width, height=height), config, checkpoint
        )
    pipeline.check_memory()
    if not config.model.is_dummy:
        find_ffmpeg()
    return config


def build(settings: ServerSettings, keys: Keys | None) -> tuple[ASGIApp, Service]:
    """Create the server's HTTP application and its service. No thread or rank is started.

    Args:
        settings: Settings of the server. Their `config` comes from `check_config`.
        keys: API keys; None: the server has no keys, and accepts only requests to loopback hosts.

    Raises:
        RequestError: The data folder, database or store belongs to another queue or program.
        OutputError: The data folder cannot be written.
    """
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
            queue.requeue_expired()
        move_orphans_aside(queue)
    except BaseException:
        queue.close()
        raise
    return create_app(service, keys), service


class Server:
    """HTTP server that serves `app` until a signal arrives, and then ends all threads in order.

    After the first SIGTERM, SIGINT or SIGHUP, new jobs are rejected, and the ranks may finish clips
    during a grace period, in which clients can still query and download clips. A second signal ends
    the process at once.

    Args:
        app: Application from `build`.
        service: Service from `build`.
        bound: Socket that is bound to the server's address.
        grace_seconds: Maximum seconds for clips in progress after the first signal.
        on_listening: Function to call once clients can connect.
        on_ready: Function to call each time the ranks become ready.
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
        self._http = _HttpServer(app)
        self._clock = SteadyClock()
        error_message = "old files cannot be removed"
        retention = PeriodicThread(
            "retention", self._enforce_retention, _SWEEP_SECONDS, error_message=error_message
        )
        orphans = PeriodicThread(
            "orphans", service.remove_orphans, ORPHAN_SCAN_SECONDS, error_message=error_message
        )
        self._threads = [
            service.verifier.thread,
            service.removal,
            service.batches.thread,
            retention,
            orphans,
        ]
        if service.settings.callback_hosts:
            self._threads.append(service.webhooks.thread)
        if service.queue.is_shared:
            # The fleet's thread is closed first, so that other servers soon continue this server's
            # unfinished clips.
            self._threads.insert(0, service.fleet.thread)
        if service.queue.store.is_remote:
            error_message = "latent checkpoints cannot be copied to the store"
            publish = service.engine.request_builder.publish_latents
            self._threads.append(PeriodicThread("store", publish, 1.0, error_message=error_message))

    def run(self) -> None:
        """Serve HTTP requests until a signal arrives or the engine fails.

        Raises:
            Exception: Error that ended the engine.
        """
        # The soft limit of open files is often 1024, too few for many clients.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        sys.setswitchinterval(_SWITCH_SECONDS)
        # A garbage collection stops all threads. After `gc.freeze`, collections take less time,
        # because they skip the many objects of torch.
        gc.collect()
        gc.freeze()
        self._catch_signals()
        self._service.engine.start()
        for thread in self._threads:
            thread.start()
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

    def _catch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._ending.is_set():
            exit_with_signal_code(number)
        self._ending.set()

    def _watch(self) -> None:
        """Wait for a signal or for the end of the engine; then close the engine and all threads."""
        was_ready = False
        while not self._ending.wait(0.5) and self._service.engine.fatal is None:
            is_ready = self._service.engine.state == "ready"
            if is_ready and not was_ready:
                self._report_ready()
            was_ready = is_ready
        self._service.is_closing = True
        try:
            # If the queue's file is gone, finished clips cannot be recorded, so there is no grace
            # period.
            grace = self._grace if self._service.queue.backend.is_there else 0.0
            logger.info("shutting down: clips in progress have {:g} s to finish", grace)
            self._service.engine.close(grace)
            for thread in self._threads:
                thread.close(_END_SECONDS)
            self._service.subscribers.is_closed = True
        finally:
            self._http.should_exit = True

    def _report_ready(self) -> None:
        """Call `on_ready` once the ranks are ready. Errors of `on_ready` do not stop the server."""
        try:
            self._on_ready()
        except Exception as error:
            with contextlib.suppress(OSError):  # the log may be on the same full disk
                logger.error("the readiness of the ranks could not be reported: {}", error)

    def _enforce_retention(self) -> None:
        """Remove the jobs that exceed the limits on age and on total size."""
        settings, queue = self._service.settings, self._service.queue
        queue.backend.maintain()
        # Shortly after the server's start, NTP may not have set the machine's clock yet. So the
        # limit on age applies only once the clock is settled. The limit on size needs no clock.
        keep_seconds = settings.keep_seconds if self._clock.is_settled else None
        if (keep_seconds, settings.keep_bytes) != (None, None):
            enforce_retention(queue, queue.now(), keep_seconds, settings.keep_bytes)


class _HttpServer(uvicorn.Server):
    def __init__(self, app: ASGIApp) -> None:
        # python_multipart would log each malformed form. The response to the client already reports
        # the fault.
        logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
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
        """Do nothing. uvicorn's own method would catch the signals that `Server` handles."""
        yield


# --- the ASGI application -------------------------------------------------------------------------

_DESCRIPTION = """
Video clips from images and prompts, by diffusion over several devices, bitwise equal to
diffusers.

The routes have the shape of OpenAI's video API. Every response with a status of 400 or above has
the body `{"error": {"type", "code", "message", "hint", "details"}}`, except those of `/health` and
`/ready`.
"""

_PAGE = Path(__file__).parent / "page"

_bearer = HTTPBearer(auto_error=False, description="API key, if the server has a file of keys.")
server = APIRouter(tags=["server"])
public = APIRouter(tags=["server"])
"""Routes that need no API key."""
_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"description": "The body has the same fields as with status 200."}
}


def create_app(service: Service, keys: Keys | None) -> ASGIApp:
    """Return the ASGI application with all routes, middleware and error handlers."""
    app = FastAPI(
        title="svdpp",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,  # FastAPI's documentation pages load scripts from another host
        redoc_url=None,
        redirect_slashes=False,
        responses={statuses: {"model": ErrorResponse} for statuses in ("4XX", "5XX")},
    )
    app.state.service = service
    install_error_handlers(app)
    videos = routes.create_routes(service.capabilities.request_model)
    for router in (videos, routes.routes, batch_routes.routes, server):
        app.include_router(router, dependencies=[] if keys is None else [Depends(_bearer)])
    app.include_router(public)
    app.mount("/page", StaticFiles(directory=_PAGE))
    owner_of = None if keys is None else keys.find_owner
    return AuthMiddleware(app, service.metrics, service.settings.upload_bytes, owner_of)


@server.get("/v1/models")
def list_models(service: ServiceDep) -> dict[str, Any]:
    """List the model of this server, with its defaults and limits."""
    settings = service.settings
    model = service.capabilities.to_json(
        max_upload_bytes=settings.upload_bytes,
        max_megapixels=settings.max_pixels // 10**6,
        max_open=settings.max_open,
        max_batch_bytes=MAX_BATCH_BYTES,
        max_batch_lines=MAX_LINES,
        max_line_bytes=MAX_JSON_BYTES,
    )
    model["loras"] = [
        {"name": name, "sha256": sha256}
        for name, (sha256, *others) in sorted(service.fleet.lora_hashes().items())
        if not others  # names that mean different files on different servers are left out
    ]
    model |= {"created": int(service.started_at), "owned_by": "svdpp"}
    return {"object": "list", "data": [model]}


@server.get("/v1/models/{id:path}")
def get_model(id: str, service: ServiceDep) -> dict[str, Any]:
    """Show the model of this server."""
    service.capabilities.check_model(id)
    return dict(list_models(service)["data"][0])


@server.get("/v1/engine")
def get_engine(service: ServiceDep, owner: OwnerDep) -> dict[str, Any]:
    """Show what the ranks do now and did in the last minute.

    Videos of other keys appear as `other`.
    """
    engine = service.engine

    @functools.cache
    def visible_id(id: str | None) -> str | None:
        job = service.queue.get(id or "")
        return id if id is None or (job is not None and job.owner == owner.name) else "other"

    return {
        "state": engine.state,
        "restarts": engine.restarts,
        "layout": {"world_size": engine.config.world_size, **engine.config.parallel.to_json()},
        "queue": service.queue.counts(),
        "ranks": [
            replace(rank, video=visible_id(rank.video)) for rank in engine.rank_monitor.snapshot()
        ],
        "spans": [
            replace(span, video=visible_id(span.video)) for span in engine.rank_monitor.spans()
        ],
        "eta_error": service.metrics.eta_error(),
    }


@server.get("/v1/servers")
def list_servers(service: ServiceDep) -> dict[str, Any]:
    """List the servers that share the queue: this server, then the last reports of the others."""
    return {"object": "list", "data": service.fleet.servers()}


@public.get("/health", responses=_NOT_READY)
async def get_health(service: ServiceDep) -> JSONResponse:
    """Report whether the ranks run: status 503 while the ranks start, restart or end."""
    return _health(service, None if service.engine.state == "ready" else "the ranks are not ready")


@public.get("/ready", responses=_NOT_READY)
def get_ready(service: ServiceDep) -> JSONResponse:
    """Report whether the server accepts requests; if not, with status 503 and the reason."""
    return _health(service, service.not_ready_reason())


def _health(service: Service, reason: str | None) -> JSONResponse:
    engine = service.engine
    body = {
        "status": "unavailable" if reason else "ok",
        "reason": reason,
        "state": engine.state,
        "ranks": sum(bool(rank.device) for rank in engine.rank_monitor.snapshot()),
        "restarts": engine.restarts,
    }
    return JSONResponse(body, 503 if reason else 200)


@server.get("/metrics", response_class=PlainTextResponse)
def get_metrics(service: ServiceDep) -> Response:
    """Show the server's metrics in Prometheus format."""
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return Response(service.metrics.render(), media_type=kind)


@public.get("/", include_in_schema=False)
def get_page() -> Response:
    """Send the web page."""
    return FileResponse(_PAGE / "index.html")
