"""The application: the page, the routes about the server itself, and how all are put together."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from fastapi import APIRouter, Depends, FastAPI, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from starlette.types import ASGIApp

from svdpp import __version__
from svdpp.serve import api_errors, routes
from svdpp.serve.form import MAX_PRIORITY
from svdpp.serve.guard import Guard, KeyCheck
from svdpp.serve.metrics import CONTENT_TYPE
from svdpp.serve.routes import Owned, Served
from svdpp.serve.service import Service
from svdpp.serve.views import EngineStatus, Health, Model, ModelList, ServerList, documented

_ABOUT = """
Images and prompts in, clips out: video diffusion over several devices, bitwise equal to
diffusers.

The routes have the shape of OpenAI's video API. Every answer of 400 and above, but those of
`/health` and `/ready`, has the body `{"error": {"type", "code", "message", "hint", "details"}}`.
"""

_PAGE = Path(__file__).parent / "page"

_bearer = HTTPBearer(auto_error=False, description="An API key, if the server has a file of them.")
server = APIRouter(tags=["server"])
public = APIRouter(tags=["server"])
"""What needs no key, beside the files of the page."""


def create_app(service: Service, *, owner_of: KeyCheck | None = None) -> ASGIApp:
    """The whole application, for an ASGI server; without `owner_of` there are no keys."""
    app = FastAPI(
        title="svdpp",
        version=__version__,
        description=_ABOUT,
        docs_url=None,  # their scripts come from another host
        redoc_url=None,
        redirect_slashes=False,
        responses=documented(401 if owner_of is not None else 403, 405, 413, 422),
    )
    app.state.service = service
    api_errors.install(app)
    for router in (routes.create_routes(service.capabilities.form), routes.routes, server):
        app.include_router(router, dependencies=[Depends(_bearer)] if owner_of else [])
    app.include_router(public)
    app.mount("/page", StaticFiles(directory=_PAGE))
    return Guard(app, service.metrics, service.settings.limits, owner_of)


@server.get("/v1/models")
def list_models(service: Served) -> ModelList:
    """The model of this server, with its defaults and limits."""
    settings = service.settings
    model = service.capabilities.to_json(
        max_upload_bytes=settings.limits.upload_bytes,
        max_megapixels=settings.max_pixels // 10**6,
        max_open=settings.max_open,
        priority=[0, MAX_PRIORITY],
    )
    return ModelList(data=[model])


@server.get("/v1/models/{id:path}", responses=documented(404))
def get_model(id: str, service: Served) -> Model:
    """The model of this server, if that is its id."""
    service.capabilities.check_model(id)
    return list_models(service).data[0]


@server.get("/v1/engine")
def get_engine(service: Served, owner: Owned) -> EngineStatus:
    """What the ranks do now, and did in the last minute; clips of other keys are `other`."""
    engine = service.engine

    @functools.cache
    def shown(id: str | None) -> str | None:
        job = service.queue.get(id or "")
        return id if id is None or (job is not None and job.owner == owner.name) else "other"

    return EngineStatus(
        state=engine.state,
        restarts=engine.restarts,
        queue=service.queue.counts(),
        ranks=[replace(rank, video=shown(rank.video)) for rank in engine.rank_view.now()],
        spans=[replace(span, video=shown(span.video)) for span in engine.rank_view.spans()],
        eta_error=service.metrics.eta_error(),
    )


@server.get("/v1/servers")
def list_servers(service: Served) -> ServerList:
    """The servers that share the queue: this one first, and the others as they were seen last."""
    return ServerList(data=service.fleet.servers())


@public.get("/health", responses={503: {"model": Health}})
async def get_health(service: Served) -> JSONResponse:
    """Whether the ranks live; 503 while they start, restart or end."""
    return _health(service, None if service.engine.state == "ready" else "the ranks are not ready")


@public.get("/ready", responses={503: {"model": Health}})
def get_ready(service: Served) -> JSONResponse:
    """Whether the server takes requests that ranks begin at once or after those before.

    Not if the queue or the disk is full, either.
    """
    return _health(service, service.why_not_ready())


def _health(service: Service, reason: str | None) -> JSONResponse:
    engine = service.engine
    body = Health(
        status="unavailable" if reason else "ok",
        reason=reason,
        state=engine.state,
        ranks=sum(bool(rank.device) for rank in engine.rank_view.now()),
        restarts=engine.restarts,
    )
    return JSONResponse(body.model_dump(), 503 if reason else 200)


@server.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def get_metrics(service: Served) -> Response:
    """Prometheus metrics."""
    return Response(service.metrics.exposed(), media_type=CONTENT_TYPE)


@public.get("/", include_in_schema=False)
def get_page() -> Response:
    """The page."""
    return FileResponse(_PAGE / "index.html")


@public.get("/favicon.ico", include_in_schema=False)
async def get_icon() -> Response:
    """Nothing: the page has no icon."""
    return Response(status_code=204)
