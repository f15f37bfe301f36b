"""Owns the routes of the clips: request, list, follow, fetch, verify, delete."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, TypeVarTuple

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, Form, Query, Request, Response, UploadFile
from fastapi.responses import FileResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from svdpp.errors import OutputError
from svdpp.media import output_files
from svdpp.serve.api_errors import ApiError, documented
from svdpp.serve.api_requests import IdempotencyKey, LastEventId, Owned, Served
from svdpp.serve.guard import UPLOAD_PATH, Limits
from svdpp.serve.job import Job, JobState
from svdpp.serve.schemas import DeletedVideo, Video, VideoPage, VideoRequest
from svdpp.serve.service import Owner, Service

#: Requests that wait for a decoder or for the ranks; each has a thread, so that others never wait
#: for one of the pool's.
_WAITERS = 256
#: Event streams that are open at the same time.
MAX_STREAMS = 1000

#: By the suffixes of stored photographs.
_IMAGE_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".webp": "image/webp",
    ".bmp": "image/bmp",
    ".tif": "image/tiff",
    ".gif": "image/gif",
}

#: Proxies are not to hold events back.
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
#: Keeps a silent connection open.
_COMMENT = b": ping\n\n"

_Kind = Literal["video", "draft"]
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

routes = APIRouter(tags=["videos"])


class EventStream(StreamingResponse):
    """Server-sent events; FastAPI's own response takes three times the processor time for each."""

    media_type = "text/event-stream"


class _Waiters:
    """The threads for calls that may wait for long."""

    def __init__(self) -> None:
        self._limiter: CapacityLimiter | None = None

    async def __call__(self, function: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
        if self._limiter is None:  # needs the event loop
            self._limiter = CapacityLimiter(_WAITERS)
        return await to_thread.run_sync(
            lambda: function(*arguments), limiter=self._limiter, abandon_on_cancel=False
        )


_in_thread = _Waiters()


@routes.post(
    UPLOAD_PATH,
    status_code=202,
    responses={
        202: {
            "description": "Stored durably.",
            "headers": {"Location": {"schema": {"type": "string"}}},
        },
        **documented(400, 404, 408, 413, 415, 422, 429, 503),
    },
)
async def create_video(
    request: Request,
    response: Response,
    service: Served,
    owner: Owned,
    idempotency_key: IdempotencyKey,
    form: Annotated[VideoRequest, Form(media_type="multipart/form-data")],
) -> Video:
    """Requests a clip of a photograph. It is stored durably before the answer."""
    limits: Limits = request.app.state.limits
    size = form.input_reference.size or 0
    if size > limits.upload_bytes:
        raise ApiError(
            413,
            "content_too_large",
            f"the photograph has {size} bytes, the limit is {limits.upload_bytes}",
            details={"limit_bytes": limits.upload_bytes},
        )
    video = await _in_thread(_create, service, form, owner, idempotency_key)
    response.headers["Location"] = f"/v1/videos/{video.id}"
    return video


def _create(service: Service, form: VideoRequest, owner: Owner, key: str | None) -> Video:
    service.check_open(has_key=key is not None)
    sampling = service.sampling_of(form)
    upload = service.photos.new_upload()
    _copy(form.input_reference, upload)
    job = service.submit(form, sampling, upload, owner=owner, idempotency_key=key)
    return service.video(service.store.get(job.id) or job)


def _copy(photo: UploadFile, path: Path) -> None:
    try:
        with path.open("wb") as file:
            photo.file.seek(0)
            shutil.copyfileobj(photo.file, file, 2**20)
    except OSError as error:
        output_files.remove(path)
        what = f"cannot store the photograph: {output_files.reason(error)}"
        raise OutputError(what, "the disk of the server may be full") from error
    except BaseException:
        output_files.remove(path)
        raise


@routes.get("/v1/videos", responses=documented(404, 422))
def list_videos(
    service: Served,
    owner: Owned,
    limit: Annotated[int, Query(ge=1, le=100, description="Of the number of videos.")] = 20,
    after: Annotated[str | None, Query(description="The last id of the page before.")] = None,
    order: Annotated[Literal["asc", "desc"], Query(description="By the time of request.")] = "desc",
    status: Annotated[JobState | None, Query(description="Only videos of this status.")] = None,
) -> VideoPage:
    """The videos of this key, the newest first."""
    found = service.videos(owner, limit=limit + 1, after=after, order=order, status=status)
    videos = found[:limit]
    return VideoPage(
        data=videos,
        first_id=videos[0].id if videos else None,
        last_id=videos[-1].id if videos else None,
        has_more=len(found) > limit,
    )


@routes.get("/v1/videos/{id}", responses=documented(404))
def get_video(id: str, service: Served, owner: Owned) -> Video:
    """A video's state, progress and ETA."""
    return service.video(service.job(id, owner))


@routes.delete("/v1/videos/{id}", responses=documented(404, 409, 503))
async def delete_video(id: str, service: Served, owner: Owned) -> DeletedVideo:
    """Cancels an unfinished video, or removes a finished one with its files.

    The answer to a cancellation comes once no rank works on the video any more.
    """
    return await _in_thread(service.delete, id, owner)


@routes.get(
    "/v1/videos/{id}/content",
    response_class=FileResponse,
    responses={
        200: {"content": {"video/mp4": {"schema": {"type": "string", "format": "binary"}}}},
        206: {"description": "The requested range."},
        **documented(404, 409, 416),
    },
)
def get_content(
    id: str,
    service: Served,
    owner: Owned,
    variant: Annotated[_Kind, Query(description="The exact clip, or its draft.")] = "video",
) -> FileResponse:
    """The clip as mp4; takes Range requests."""
    job = service.job(id, owner) if variant == "draft" else service.completed(id, owner)
    path = service.clip_path(job, is_draft=variant == "draft")
    if not path.is_file():
        what = "the video has no draft" if variant == "draft" else "the video has no file"
        raise ApiError(404, f"no_{'draft' if variant == 'draft' else 'content'}", what)
    return _private_file(path, "video/mp4")


def _private_file(path: Path, media_type: str) -> FileResponse:
    """A file that never changes, for its owner alone."""
    return FileResponse(
        path,
        media_type=media_type,
        filename=path.name,
        content_disposition_type="inline",
        headers={"Cache-Control": "private, max-age=3600, immutable"},
    )


@routes.head("/v1/videos/{id}/content", include_in_schema=False)
def head_content(id: str, service: Served, owner: Owned, variant: _Kind = "video") -> FileResponse:
    """The headers of the clip."""
    return get_content(id, service, owner, variant)


@routes.get(
    "/v1/videos/{id}/input",
    response_class=FileResponse,
    responses={
        200: {"content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}},
        206: {"description": "The requested range."},
        **documented(404, 416),
    },
)
def get_input(id: str, service: Served, owner: Owned) -> FileResponse:
    """The photograph, as the client sent it."""
    path = service.photo_path(service.job(id, owner))
    if not path.is_file():
        raise ApiError(404, "no_input", "the video has no photograph any more")
    return _private_file(path, _IMAGE_TYPES[path.suffix])


@routes.get("/v1/videos/{id}/metadata", responses=documented(404, 409))
def get_metadata(id: str, service: Served, owner: Owned) -> dict[str, Any]:
    """The clip's JSON: parameters, hashes, versions."""
    return service.completed(id, owner).metadata


@routes.post("/v1/videos/{id}/verify", status_code=202, responses=documented(404, 409, 503))
def verify_video(id: str, service: Served, owner: Owned) -> Video:
    """Has the clip made again on one device, when the ranks are idle, and compared bit by bit."""
    return service.verify(id, owner)


def _followed(id: str, service: Served, owner: Owned) -> Job:
    """The job, before the answer begins: afterwards no error can be answered."""
    job = service.job(id, owner)
    if service.events.num_subscribers >= MAX_STREAMS:
        raise ApiError(
            503,
            "too_many_streams",
            f"{MAX_STREAMS} clients follow clips already",
            f"GET /v1/videos/{id} says the same",
            details={"limit": MAX_STREAMS},
            headers={"Retry-After": "10"},
        )
    return job


@routes.get(
    "/v1/videos/{id}/events",
    response_class=EventStream,
    responses=documented(404, 503),
)
async def follow_video(
    job: Annotated[Job, Depends(_followed)], service: Served, last_id: LastEventId
) -> EventStream:
    """The video's state as server-sent events, on every change; ends after a final state.

    A client that comes back with `Last-Event-ID` gets the present state if it has changed.
    """
    return EventStream(_events(job, service, last_id), headers=_STREAM_HEADERS)


async def _events(job: Job, service: Service, last_id: int | None) -> AsyncIterator[bytes]:
    async with service.events.subscribe(job.id, last_id) as subscription:
        newest = service.events.newest(job.id)
        if newest is not None and newest.is_final:  # also to a client that has it
            yield _event(newest.data, newest.id)
            return
        if newest is None:  # nothing has happened since the server's start
            found = await run_in_threadpool(service.store.get, job.id)  # it may have ended since
            if found is None:
                return
            video = await run_in_threadpool(service.video, found)
            yield _event(video.model_dump(mode="json"), int(time.time() * 1000))
            if found.state.is_final:
                return
        async for event in subscription:
            yield _COMMENT if event is None else _event(event.data, event.id)


def _event(video: Mapping[str, Any], id: int) -> bytes:
    return f"event: video\ndata: {json.dumps(video)}\nid: {id}\n\n".encode()
