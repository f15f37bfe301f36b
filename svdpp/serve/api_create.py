"""The routes that request a clip, whose fields are those of the server's model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response, UploadFile
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse

from svdpp.errors import OutputError, error_from_dict
from svdpp.media import output_files
from svdpp.serve.api_errors import ApiError, documented
from svdpp.serve.api_requests import IdempotencyKey, Owned, Served, in_thread
from svdpp.serve.api_videos import check_streams, get_content
from svdpp.serve.auth import Owner
from svdpp.serve.forms import VideoRequest
from svdpp.serve.guard import JSON, JSON_BYTES, Limits
from svdpp.serve.job import JobState
from svdpp.serve.schemas import Video
from svdpp.serve.service import Service

_TEXT = {"schema": {"type": "string"}}
_REFUSALS = documented(400, 404, 408, 413, 415, 422, 429, 503)
_STORED = {
    202: {"description": "Stored durably.", "headers": {"Location": _TEXT}},
    **_REFUSALS,
}
_MADE = {
    200: {
        "description": "The clip.",
        "headers": {"X-Request-Id": _TEXT, "X-Model": _TEXT, "X-Inference-Time-S": _TEXT},
        "content": {"video/mp4": {"schema": {"type": "string", "format": "binary"}}},
    },
    **_REFUSALS,
    **documented(409, 500),
}


def create_routes(form_type: type[VideoRequest]) -> APIRouter:
    """The routes whose body is a `form_type`."""
    routes = APIRouter(tags=["videos"])
    body = {"requestBody": _described(form_type)}

    @routes.post("/v1/videos", status_code=202, responses=_STORED, openapi_extra=body)
    async def create_video(
        request: Request, response: Response, service: Served, owner: Owned, key: IdempotencyKey
    ) -> Video:
        """Requests a clip. It is stored durably before the answer."""
        video = await _requested(form_type, request, service, owner, key)
        response.headers["Location"] = f"/v1/videos/{video.id}"
        return video

    @routes.post(
        "/v1/videos/sync", response_class=FileResponse, responses=_MADE, openapi_extra=body
    )
    async def make_video(
        request: Request, service: Served, owner: Owned, key: IdempotencyKey
    ) -> Response:
        """Requests a clip, waits until it is made, and answers with the mp4.

        A client that goes away does not cancel it; the list has it.
        """
        check_streams(service)
        video = await _requested(form_type, request, service, owner, key)
        request.state.upload.close()  # so that others may send theirs
        await _wait(request, service, video.id)
        return await in_thread(_made, service, video.id, owner, request)

    return routes


def _described(form_type: type[VideoRequest]) -> dict[str, Any]:
    """The body for the OpenAPI document: a form, or JSON, in which a photograph is text."""
    form = form_type.model_json_schema()
    as_json = {**form, "properties": dict(form["properties"])}
    if photo := as_json["properties"].get("input_reference"):
        url = {"type": "object", "properties": {"image_url": {"type": "string"}}}
        as_json["properties"]["input_reference"] = {
            "description": f"{photo['description']} In base64, or as a data URL.",
            "anyOf": [
                {"type": "string", "contentEncoding": "base64"},
                {**url, "required": ["image_url"], "additionalProperties": False},
            ],
        }
    kinds = {"multipart/form-data": {"schema": form}, JSON: {"schema": as_json}}
    return {"required": True, "content": kinds}


async def _requested(
    form_type: type[VideoRequest], request: Request, service: Service, owner: Owner, key: str | None
) -> Video:
    """The new video, or the one of an earlier request with the same key."""

    async def create(body: bytes | FormData) -> Video:
        limits: Limits = request.app.state.limits
        return await in_thread(_create, service, form_type, body, limits, owner, key)

    try:
        if request.headers["content-type"].lower().startswith(JSON):
            return await create(b"".join([chunk async for chunk in request.stream()]))
        async with request.form(max_part_size=JSON_BYTES) as form:
            return await create(form)
    except ClientDisconnect:
        raise HTTPException(400, "the client has gone") from None
    except OSError as error:
        what = f"cannot store the body: {output_files.reason(error)}"
        raise OutputError(what, "the disk of the server may be full") from error


def _checked(form_type: type[VideoRequest], body: bytes | FormData) -> VideoRequest:
    try:
        fields = from_json(body) if isinstance(body, bytes) else dict(body)
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"the body is not JSON: {error}") from None
    try:
        return form_type.model_validate(fields)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise RequestValidationError(
            [{**fault, "loc": ("body", *fault["loc"])} for fault in faults]
        ) from None


def _create(
    service: Service,
    form_type: type[VideoRequest],
    body: bytes | FormData,
    limits: Limits,
    owner: Owner,
    key: str | None,
) -> Video:
    form = _checked(form_type, body)
    size = 0 if form.photo is None else form.photo.size or 0
    if size > limits.upload_bytes:
        raise ApiError(
            413,
            "content_too_large",
            f"the photograph has {size} bytes, the limit is {limits.upload_bytes}",
            details={"limit_bytes": limits.upload_bytes},
        )
    service.check_open(has_key=key is not None)
    sampling = service.sampling_of(form)
    upload = None
    if form.photo is not None:
        upload = service.photos.new_upload()
        _copy(form.photo, upload)
    job = service.submit(form, sampling, upload, owner=owner, idempotency_key=key)
    return service.video(service.store.get(job.id) or job)


def _copy(photo: UploadFile, path: Path) -> None:
    try:
        with path.open("wb") as file:
            photo.file.seek(0)
            shutil.copyfileobj(photo.file, file, 2**20)
    except BaseException:
        output_files.remove(path)
        raise


async def _wait(request: Request, service: Service, id: str) -> None:
    """Returns once the video is final, or nobody waits for it any more."""
    async with service.events.subscribe(id) as subscription:
        job = await in_thread(service.store.get, id)
        if job is None or job.state.is_final:  # its event may be forgotten
            return
        async for event in subscription:
            if (event is not None and event.is_final) or await request.is_disconnected():
                return


def _made(service: Service, id: str, owner: Owner, request: Request) -> Response:
    job = service.job(id, owner)
    if job.state is JobState.FAILED:
        assert job.error is not None
        raise error_from_dict(job.error)
    if not job.state.is_final:
        raise ApiError(
            *(503, "closing", f"the server ends before {id} is made"),
            "it goes on when the server starts again: ask for the video then",
            details={"id": id},
            headers={"Retry-After": "30"},
        )
    answer = get_content(id, service, owner, request)
    answer.headers["X-Request-Id"] = id
    answer.headers["X-Model"] = service.offer.model
    seconds = (job.finished_at or 0.0) - (job.started_at or 0.0)
    answer.headers["X-Inference-Time-S"] = f"{seconds:.3f}"
    return answer
