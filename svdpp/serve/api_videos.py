"""The routes of requested clips: list, follow, fetch, verify, delete."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from svdpp.serve.api_errors import ApiError, documented
from svdpp.serve.api_requests import LastEventId, Owned, Served, in_thread
from svdpp.serve.job import Job, JobState
from svdpp.serve.page_files import unless_known
from svdpp.serve.schemas import DeletedVideo, Video, VideoPage
from svdpp.serve.service import Service

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

routes = APIRouter(tags=["videos"])


class EventStream(StreamingResponse):
    """Server-sent events; FastAPI's own response takes three times the processor time for each."""

    media_type = "text/event-stream"


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


@routes.delete("/v1/videos/{id}", responses=documented(404, 503))
async def delete_video(id: str, service: Served, owner: Owned) -> DeletedVideo:
    """Removes a video with its files; one that is not finished is cancelled before.

    The answer comes once no rank works on the video any more. A repeated request changes nothing:
    it is answered by 404, as every other one about a removed video.
    """
    return await in_thread(service.delete, id, owner)


@routes.post("/v1/videos/{id}/cancel", responses=documented(404, 503))
async def cancel_video(id: str, service: Served, owner: Owned) -> Video:
    """Cancels a video that is not finished, and keeps it; `DELETE` removes it.

    The answer comes once no rank works on the video any more. A repeated request changes nothing,
    nor does one for a video that is finished: the answer has its status.
    """
    return service.video(await in_thread(service.cancel, id, owner))


@routes.get(
    "/v1/videos/{id}/content",
    response_class=FileResponse,
    responses={
        200: {"content": {"video/mp4": {"schema": {"type": "string", "format": "binary"}}}},
        206: {"description": "The requested range."},
        304: {"description": "The client has it: `If-None-Match` names it."},
        **documented(404, 409, 416),
    },
)
def get_content(
    id: str,
    service: Served,
    owner: Owned,
    request: Request,
) -> Response:
    """The clip as mp4; takes Range requests."""
    path = service.clip_path(service.completed(id, owner))
    if not path.is_file():
        raise ApiError(404, "no_content", "the video has no file")
    return _private_file(path, "video/mp4", request)


def _private_file(path: Path, media_type: str, request: Request) -> Response:
    """A file that never changes, for its owner alone."""
    answer = FileResponse(
        path,
        media_type=media_type,
        filename=path.name,
        content_disposition_type="inline",
        headers={"Cache-Control": "private, max-age=3600, immutable"},
        stat_result=path.stat(),
    )
    return unless_known(answer, request)


@routes.head("/v1/videos/{id}/content", include_in_schema=False)
def head_content(id: str, service: Served, owner: Owned, request: Request) -> Response:
    """The headers of the clip."""
    return get_content(id, service, owner, request)


@routes.get(
    "/v1/videos/{id}/input",
    response_class=FileResponse,
    responses={
        200: {"content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}},
        206: {"description": "The requested range."},
        304: {"description": "The client has it: `If-None-Match` names it."},
        **documented(404, 416),
    },
)
def get_input(id: str, service: Served, owner: Owned, request: Request) -> Response:
    """The photograph, as the client sent it."""
    job = service.job(id, owner)
    if not job.photo:
        raise ApiError(404, "no_input", "the video was made from text alone")
    path = service.photo_path(job)
    if not path.is_file():
        raise ApiError(404, "no_input", "the video has no photograph any more")
    return _private_file(path, _IMAGE_TYPES[path.suffix], request)


@routes.get("/v1/videos/{id}/metadata", responses=documented(404, 409))
def get_metadata(id: str, service: Served, owner: Owned) -> dict[str, Any]:
    """The clip's JSON: parameters, hashes, versions."""
    return service.completed(id, owner).metadata


@routes.post("/v1/videos/{id}/verify", status_code=202, responses=documented(404, 409, 503))
def verify_video(id: str, service: Served, owner: Owned) -> Video:
    """Has the clip made again on one device, when the ranks are idle, and compared bit by bit."""
    return service.verify(id, owner)


def check_streams(service: Service) -> None:
    """Refuses one more client that waits for a clip."""
    if service.events.num_subscribers >= MAX_STREAMS:
        raise ApiError(
            503,
            "too_many_streams",
            f"{MAX_STREAMS} clients follow clips already",
            "GET /v1/videos/{id} says the same",
            details={"limit": MAX_STREAMS},
            headers={"Retry-After": "10"},
        )


def _followed(id: str, service: Served, owner: Owned) -> Job:
    """The job, before the answer begins: afterwards no error can be answered."""
    job = service.job(id, owner)
    check_streams(service)
    return job


@routes.get(
    "/v1/videos/{id}/events",
    response_class=EventStream,
    responses={
        200: {
            "description": "Events named `video`. The data of each is the video as JSON, its id is "
            "for `Last-Event-ID`.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
        204: {"description": "The client has the last event: it must not come back."},
        **documented(404, 503),
    },
)
async def follow_video(
    job: Annotated[Job, Depends(_followed)], service: Served, last_id: LastEventId
) -> Response:
    """The video's state as server-sent events, on every change; ends after a final state.

    A client that comes back with `Last-Event-ID` gets the present state if it has changed.
    """
    if last_id is not None and job.state.is_final:
        newest = service.events.newest(job.id)
        if newest is None:  # it is forgotten, as by a restart
            has_last = last_id >= 1000 * (job.finished_at or 0.0)
        else:
            has_last = newest.is_final and last_id >= newest.id
        if has_last:
            return Response(status_code=204)
    return EventStream(_events(job, service, last_id), headers=_STREAM_HEADERS)


async def _events(job: Job, service: Service, last_id: int | None) -> AsyncIterator[bytes]:
    async with service.events.subscribe(job.id, last_id) as subscription:
        id = service.events.new_id()  # first, so that what happens from here on has a larger one
        if service.events.newest(job.id) is None:  # nothing has happened since the server's start
            found = await run_in_threadpool(service.store.get, job.id)  # it may have ended since
            if found is None:
                return
            video = await run_in_threadpool(service.video, found)
            yield _event(video.model_dump(mode="json"), id)
            if found.state.is_final:
                return
        async for event in subscription:
            yield _COMMENT if event is None else _event(event.data, event.id)


def _event(video: Mapping[str, Any], id: int) -> bytes:
    return f"event: video\ndata: {json.dumps(video)}\nid: {id}\n\n".encode()
