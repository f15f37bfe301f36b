"""The application: the page, the routes about the server itself, and how all are put together."""

from __future__ import annotations

import functools
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.security import HTTPBearer
from starlette.types import ASGIApp

from svdpp import __version__
from svdpp.serve import api_errors, routes
from svdpp.serve.api_errors import documented
from svdpp.serve.guard import PAGE_FILES, PUBLIC_PATHS, Guard, KeyCheck, Limits
from svdpp.serve.metrics import CONTENT_TYPE
from svdpp.serve.routes import Owned, Served
from svdpp.serve.service import Service
from svdpp.serve.views import EngineStatus, Health, Model, ModelList

_ABOUT = """
Images and prompts in, clips out: video diffusion over several devices, bitwise equal to
diffusers.

The routes have the shape of OpenAI's video API. Every answer of 400 and above, but those of
`/health` and `/ready`, has the body `{"error": {"type", "code", "message", "hint", "details"}}`.
"""

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
#: In place of the ids of other owners' clips.
_OTHER = "other"

_bearer = HTTPBearer(auto_error=False, description="An API key, if the server has a file of them.")
server = APIRouter(tags=["server"])
page = APIRouter(include_in_schema=False)


def create_app(
    service: Service, *, limits: Limits | None = None, owner_of: KeyCheck | None = None
) -> ASGIApp:
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
    app.state.limits = limits or Limits()
    api_errors.install(app)
    for router in (routes.create_routes(service.capabilities.form), routes.routes, server):
        app.include_router(router, dependencies=[Depends(_bearer)] if owner_of else [])
    app.include_router(page)
    app.openapi = functools.cache(lambda: _document(app))  # type: ignore[method-assign]
    return Guard(app, service.metrics, app.state.limits, owner_of)


def _document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document.

    In it errors are JSON also where all else is a stream of events, and public paths need no key.
    """
    document = FastAPI.openapi(app)
    for path in PUBLIC_PATHS & document["paths"].keys():
        for operation in document["paths"][path].values():
            operation.pop("security", None)
    answers = (
        answer
        for path in document["paths"].values()
        for operation in path.values()
        for status, answer in operation["responses"].items()
        if int(status) >= HTTPStatus.BAD_REQUEST
    )
    for answer in answers:
        content = answer.get("content", {})
        if "text/event-stream" in content:
            schema = {"$ref": "#/components/schemas/ErrorAnswer"}
            answer["content"] = {"application/json": {"schema": schema}}
    return document


@server.get("/v1/models")
def list_models(service: Served, request: Request) -> ModelList:
    """The model of this server, with its defaults and limits."""
    limits: Limits = request.app.state.limits
    model = service.capabilities.to_json(
        max_upload_bytes=limits.upload_bytes,
        max_megapixels=service.photos.limits.max_pixels // 10**6,
        max_open=service.max_open,
        priority=[0, 9],
    )
    return ModelList(data=[model])


@server.get("/v1/models/{id:path}", responses=documented(404))
def get_model(id: str, service: Served, request: Request) -> Model:
    """The model of this server, if that is its id."""
    service.capabilities.check_model(id)
    return list_models(service, request).data[0]


@server.get("/v1/engine")
def get_engine(service: Served, owner: Owned) -> EngineStatus:
    """What the ranks do now, and did in the last minute; clips of other keys are `other`."""
    engine = service.engine

    @functools.cache
    def shown(id: str | None) -> str | None:
        job = None if id is None else service.queue.get(id)
        is_shown = id is None or (job is not None and job.owner == owner.name)
        return id if is_shown else _OTHER

    return EngineStatus(
        state=engine.state,
        restarts=engine.restarts,
        queue=service.queue.counts(),
        ranks=[replace(rank, video=shown(rank.video)) for rank in engine.rank_view.now()],
        spans=[replace(span, video=shown(span.video)) for span in engine.rank_view.spans()],
        eta_error=service.metrics.eta_error(),
    )


@server.get("/health", responses={503: {"model": Health}})
async def get_health(service: Served) -> JSONResponse:
    """Whether the ranks live; 503 while they start, restart or end."""
    return _health(service, None if service.engine.state == "ready" else "the ranks are not ready")


@server.get("/ready", responses={503: {"model": Health}})
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


@page.get("/")
@page.get("/page/{name}")
def get_page(request: Request) -> Response:
    """A file of the page; only those in the list, so no path of a client reaches the disk."""
    file = PAGE_FILES.get(request.scope["path"])
    if file is None:
        raise HTTPException(404)
    kind = f"{_TYPES[file.suffix]}; charset=utf-8"
    # Asked again each time, so that page and server are of one version.
    headers = {"Cache-Control": "no-cache"}
    answer = FileResponse(file, media_type=kind, headers=headers, stat_result=file.stat())
    return routes.unless_known(answer, request)


@page.get("/favicon.ico")
async def get_icon() -> Response:
    """Nothing: the page names its icon."""
    return Response(status_code=204)
