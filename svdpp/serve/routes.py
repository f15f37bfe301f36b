"""Routes of videos: request, list, follow, fetch, verify, cancel, delete."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import AsyncIterator, Generator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import FileResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from svdpp.config import SAMPLING_CLASSES
from svdpp.config.pipeline import LAST_IMAGE, REFERENCES
from svdpp.errors import OutputError, error_from_dict
from svdpp.media import output_files
from svdpp.serve.archive import MAX_CLIPS, Archive, clip_members, zip_members
from svdpp.serve.auth import Owner
from svdpp.serve.files import PrivateFile, clip_name, content_disposition, input_name
from svdpp.serve.job import JobState
from svdpp.serve.middleware import JSON_MEDIA_TYPE, MAX_JSON_BYTES
from svdpp.serve.request_schema import VideoRequest, parse_json, without_repetition
from svdpp.serve.schemas import IMAGE_FIELD, ApiError, DeletedVideo, Video, VideoPage
from svdpp.serve.service import Service

#: Maximum number of open event streams and archives.
MAX_STREAMS = 1000
#: Maximum number of open event streams and archives with one API key.
MAX_STREAMS_OF_KEY = 200

_MAX_IDEMPOTENCY_KEY = 255
#: Run a function in a thread outside of the shared thread pool, because the function may wait long
#: for a decoder or the ranks.
run_in_own_thread = functools.partial(to_thread.run_sync, limiter=CapacityLimiter(256))


# Dependencies of routes are coroutines. FastAPI would run a plain function in a thread, which takes
# longer than the function itself.
async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _owner(request: Request) -> Owner:
    """Return the owner of the request's API key, which `AuthMiddleware` has checked."""
    owner: Owner = request.scope["state"]["owner"]
    return owner


ServiceDep = Annotated[Service, Depends(_service)]
OwnerDep = Annotated[Owner, Depends(_owner)]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="Key of the request; repeated requests with the same key make one clip.",
    ),
]
LastEventId = Annotated[
    str | None,
    Header(alias="Last-Event-ID", description="Id of the last event that the client received."),
]


# --- routes that request clips --------------------------------------------------------------------


def _file_response(*kinds: str) -> dict[str, Any]:
    """Return the arguments of FastAPI's decorator for a route that sends a file.

    Args:
        kinds: Media types that the file may have.
    """
    binary = {"schema": {"type": "string", "format": "binary"}}
    content = dict.fromkeys(kinds, binary)
    return {"response_class": FileResponse, "responses": {200: {"content": content}}}


def create_routes(request_model: type[VideoRequest]) -> APIRouter:
    """Return the routes that request clips, with bodies of the schema `request_model`."""
    routes = APIRouter(tags=["videos"])
    body = {"requestBody": _request_body(request_model)}

    @routes.post("/v1/videos", status_code=202, openapi_extra=body)
    async def create_video(
        request: Request,
        response: Response,
        service: ServiceDep,
        owner: OwnerDep,
        key: IdempotencyKey = None,
    ) -> Video:
        """Request a clip. The request is stored durably before the response is sent."""
        video = await _create_from_request(request, service, owner, key)
        response.headers["Location"] = f"/v1/videos/{video.id}"
        return video

    @routes.post("/v1/videos/sync", openapi_extra=body, **_file_response("video/mp4"))
    async def make_video(
        request: Request, service: ServiceDep, owner: OwnerDep, key: IdempotencyKey = None
    ) -> Response:
        """Request a clip, wait until it is made, and send the mp4.

        If the client disconnects, the clip is still made, and listed by `GET /v1/videos`.
        """
        _check_streams(service, owner)
        video = await _create_from_request(request, service, owner, key)
        # the upload is complete, and no longer counts towards the limit of uploads
        request.state.upload.close()
        await _wait_until_final(request, service, video.id, owner)
        return await run_in_own_thread(_finished_clip, service, video.id, owner)

    return routes


def _request_body(request_model: type[VideoRequest]) -> dict[str, Any]:
    """Return the OpenAPI schema of a video request's body: a form, or JSON with files as text."""
    form = request_model.model_json_schema()
    text = {"type": "string", "contentEncoding": "base64"}
    videos = (name for kind in SAMPLING_CLASSES.values() for name in kind.videos)
    files = {IMAGE_FIELD, LAST_IMAGE, *videos}
    fields = form["properties"]
    as_text: dict[str, Any] = {
        name: {**text, "description": f"{fields[name]['description']} Or a data URL."}
        for name in fields.keys() & files
    }
    if REFERENCES in fields:
        about = fields[REFERENCES]["description"]
        as_text[REFERENCES] = {"type": "array", "items": text, "description": about}
    as_json = {**form, "properties": fields | as_text}
    kinds = {"multipart/form-data": {"schema": form}, JSON_MEDIA_TYPE: {"schema": as_json}}
    return {"required": True, "content": kinds}


def check_idempotency_key(key: str | None) -> None:
    """Reject an idempotency key that is too long or has other characters than visible ASCII."""
    if key is not None and not re.fullmatch(rf"[\x21-\x7e]{{1,{_MAX_IDEMPOTENCY_KEY}}}", key):
        longest = _MAX_IDEMPOTENCY_KEY
        text = f"Idempotency-Key must be 1 to {longest} visible ASCII characters without spaces"
        hint = "use a UUID"
        raise ApiError(
            400,
            "invalid_idempotency_key",
            text,
            hint,
            min_length=1,
            max_length=_MAX_IDEMPOTENCY_KEY,
        )


async def _create_from_request(
    request: Request, service: Service, owner: Owner, key: str | None
) -> Video:
    check_idempotency_key(key)
    try:
        if request.headers["content-type"].lower().startswith(JSON_MEDIA_TYPE):
            return await run_in_own_thread(_create, service, await request.body(), owner, key)
        async with request.form(max_part_size=MAX_JSON_BYTES) as form:
            return await run_in_own_thread(_create, service, form, owner, key)
    except ClientDisconnect:
        raise HTTPException(400, "the client has disconnected") from None
    except HTTPException as error:  # Starlette's form parser raises this
        raise _malformed_body("invalid_form", error.detail) from None
    except OSError as error:
        text = f"cannot store the body: {output_files.error_reason(error)}"
        raise OutputError(text, "the disk of the server may be full") from error


def _malformed_body(code: str, reason: str) -> ApiError:
    text = "the body must be a JSON object, or a form as multipart/form-data"
    return ApiError(400, code, f"{text}: {reason}", reason=reason)


def _form_fields(form: FormData) -> dict[str, Any]:
    """Return the fields of a form that requests a video; raise an `ApiError` if one is repeated.

    Raises:
        ApiError: A field is sent more than once. This is allowed only for references.
    """
    items = form.multi_items()
    fields = without_repetition([(name, value) for name, value in items if name != REFERENCES])
    if references := [value for name, value in items if name == REFERENCES]:
        fields[REFERENCES] = references
    # Browsers send line breaks as CRLF, JSON clients as LF. The same prompt must give the same
    # clip.
    for name in ("prompt", "negative_prompt"):
        if isinstance(value := fields.get(name), str):
            fields[name] = value.replace("\r\n", "\n")
    return fields


def _create(service: Service, body: bytes | FormData, owner: Owner, key: str | None) -> Video:
    try:
        fields = parse_json(body) if isinstance(body, bytes) else _form_fields(body)
        if not isinstance(fields, dict):
            raise ValueError("the JSON value is not an object")
    except ValueError as error:
        raise _malformed_body("invalid_json", str(error)) from None
    return service.submit(service.capabilities.validate(fields), owner, key)


async def _wait_until_final(request: Request, service: Service, id: str, owner: Owner) -> None:
    """Wait until a video has ended, its client has disconnected, or the server is closing."""
    with service.subscribers.subscribe(owner.name):
        while not (service.subscribers.is_closed or await request.is_disconnected()):
            with suppress(OutputError):  # if the queue is unavailable, it is queried again later
                job = await run_in_own_thread(service.queue.get, id)
                if job is None or job.state.is_final:
                    return
            await service.subscribers.wait()


def _finished_clip(service: Service, id: str, owner: Owner) -> Response:
    job = service.job(id, owner)
    if job.state is JobState.FAILED:
        assert job.error is not None
        raise error_from_dict(job.error)
    if not job.state.is_final:
        text = f"the server is shutting down, and {id} is not finished"
        hint = "the clip continues after the next start of the server"
        raise ApiError(503, "closing", text, hint, retry=30, id=id)
    response = get_content(id, service, owner)
    response.headers["X-Request-Id"] = id
    response.headers["X-Model"] = service.capabilities.model
    # If one server started the clip and another finished it, a difference between their clocks
    # could make the time negative.
    seconds = max(0.0, (job.finished_at or 0.0) - (job.started_at or 0.0))
    response.headers["X-Inference-Time-S"] = f"{seconds:.3f}"
    return response


# --- routes of existing clips ---------------------------------------------------------------------

routes = APIRouter(tags=["videos"])


@routes.get("/v1/videos")
def list_videos(
    service: ServiceDep,
    owner: OwnerDep,
    limit: Annotated[int, Query(ge=1, le=100, description="Maximum number of videos.")] = 20,
    after: Annotated[str | None, Query(description="Last id of the previous page.")] = None,
    order: Annotated[
        Literal["asc", "desc"], Query(description="Order by the time of request.")
    ] = "desc",
    status: Annotated[
        JobState | None, Query(description="Status of the videos; by default, any.")
    ] = None,
    batch_id: Annotated[
        str | None,
        Query(
            description="Id of a batch, to list only its videos; by default, all videos are listed."
        ),
    ] = None,
) -> VideoPage:
    """List the videos of this key, the newest first."""
    jobs_and_next = service.videos(
        owner, limit=limit + 1, after=after, order=order, status=status, batch_id=batch_id
    )
    videos = jobs_and_next[:limit]
    return VideoPage(
        data=videos,
        first_id=videos[0].id if videos else None,
        last_id=videos[-1].id if videos else None,
        has_more=len(jobs_and_next) > limit,
    )


# Declared before `/v1/videos/{id}`, which would otherwise match this path.
@routes.get("/v1/videos/archive", **_file_response("application/zip"))
def get_archive(
    service: ServiceDep,
    owner: OwnerDep,
    ids: Annotated[
        list[str] | None,
        Query(max_length=1000, description="Ids of finished videos; by default, all of this key."),
    ] = None,
) -> Response:
    """Send finished clips in an uncompressed zip, with readable file names.

    The last file of the zip, `clips.jsonl`, has a line for each clip: the video object, and the
    clip's file name as `file`.
    """
    _check_streams(service, owner)
    service.queue.store.check()
    found = _archive_ids(service, owner, ids)
    name = f"clips-{datetime.fromtimestamp(service.queue.now()):%Y-%m-%d}.zip"
    headers = {"Content-Disposition": content_disposition(name, "attachment")}
    parts = _archive_parts(service, owner, zip_members(clip_members(service, owner, found)))
    return Archive(parts, headers=headers)


def _archive_ids(service: Service, owner: Owner, ids: list[str] | None) -> list[str]:
    """Return the ids of the clips for an archive: the requested ones, or all that are completed.

    Args:
        service: Service of the server.
        owner: Owner of the clips.
        ids: Requested ids; None or empty: all completed clips of the owner.

    Raises:
        ApiError: A requested clip is not completed. Without requested ids: no clip is completed, or
            more than `MAX_CLIPS` clips are completed.
    """
    if ids:
        return [service.completed(id, owner).id for id in dict.fromkeys(ids)]
    found = service.queue.completed_ids(owner.name, MAX_CLIPS + 1)
    if not found:
        hint = "the status of a video shows its progress"
        raise ApiError(404, "no_clips", "no video of this key is completed", hint)
    if len(found) > MAX_CLIPS:
        text = f"an archive has {MAX_CLIPS} clips at most, and more are completed"
        hint = "name the clips for the archive by their ids: ids=ID&ids=ID"
        raise ApiError(413, "too_many_clips", text, hint, field="ids", limit=MAX_CLIPS)
    return found


async def _archive_parts(
    service: Service, owner: Owner, parts: Generator[bytes, None, None]
) -> AsyncIterator[bytes]:
    """Yield the bytes of a zip of clips.

    Until the end, the zip counts towards the limits on open streams (`MAX_STREAMS`).

    Args:
        service: Service of the server.
        owner: Owner of the clips.
        parts: Generator of the bytes. It runs in a thread, because it waits for files.
    """
    with service.subscribers.subscribe(owner.name):
        try:
            while (part := await run_in_own_thread(next, parts, None)) is not None:
                yield part
        finally:
            parts.close()


@routes.get("/v1/videos/{id}")
def get_video(id: str, service: ServiceDep, owner: OwnerDep) -> Video:
    """Show a video's state, progress and ETA."""
    return service.video(service.job(id, owner))


def _accepted_response(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of a response with status 202 (accepted, not finished)."""
    return {202: {"model": model, "description": "Ranks still work on the video."}}


@routes.delete("/v1/videos/{id}", responses=_accepted_response(DeletedVideo))
def delete_video(id: str, service: ServiceDep, owner: OwnerDep, response: Response) -> DeletedVideo:
    """Remove a video with its files. An unfinished video is cancelled first.

    From then on the id is unknown, so a repeated request gets 404. Status 202 means that a rank
    still works on the video; the files are removed as soon as the rank has dropped it.
    """
    deleted, is_gone = service.delete(id, owner)
    response.status_code = 200 if is_gone else 202
    return deleted


@routes.post("/v1/videos/{id}/cancel", responses=_accepted_response(Video))
def cancel_video(id: str, service: ServiceDep, owner: OwnerDep, response: Response) -> Video:
    """Cancel an unfinished video, but keep it in the list; `DELETE` would remove it.

    Status 202 means that a rank still works on the video: `cancel_requested` is true, and the
    video's status becomes `cancelled` as soon as the rank has dropped it. A repeated request
    changes nothing.
    """
    video = service.video(service.cancel(id, owner))
    response.status_code = 200 if video.status.is_final else 202
    return video


def _fetch_file(service: Service, path: Path | None, code: str) -> Path:
    """Return the path of a video's file, after fetching the file from the store if necessary.

    Args:
        service: Service of the server.
        path: Path of the file in the data folder; None: the video has no such file.
        code: Code of the error if there is no file.

    Raises:
        ApiError: The file does not exist: status 404, with `code`.
    """
    if path is not None:
        service.queue.store.fetch(path)
    if path is None or not path.is_file():
        service.queue.store.check()
        raise ApiError(404, code, "the video has no such file")
    return path


@routes.get("/v1/videos/{id}/content", **_file_response("video/mp4"))
def get_content(
    id: str,
    service: ServiceDep,
    owner: OwnerDep,
    variant: Annotated[  # noqa: ARG001  # other variants are rejected instead of sending the mp4
        Literal["video"], Query(description="Only `video` is available: there are no thumbnails.")
    ] = "video",
) -> Response:
    """Send the clip as mp4. Range requests are supported."""
    job = service.completed(id, owner)
    path = _fetch_file(service, job.clip_path(service.folder), "no_content")
    sha256 = job.metadata.get("file_sha256", "")
    return PrivateFile(path, clip_name(job), sha256, job.finished_at or 0.0)


@routes.get("/v1/videos/{id}/input", **_file_response("image/*", "video/*"))
def get_input(id: str, service: ServiceDep, owner: OwnerDep, field: str = IMAGE_FIELD) -> Response:
    """Send an input file of a video as the client sent it: by default the image or video."""
    job, folder = service.job(id, owner), service.folder
    paths = {IMAGE_FIELD: job.input_path(folder), **job.further_paths(folder)}
    path = _fetch_file(service, paths.get(field), "no_input")
    sha256 = job.further_inputs.get(field, job.input_sha256)
    return PrivateFile(path, input_name(job, path), sha256, job.created_at)


@routes.get("/v1/videos/{id}/metadata")
def get_metadata(id: str, service: ServiceDep, owner: OwnerDep) -> dict[str, Any]:
    """Show the metadata of a clip: parameters, hashes and versions."""
    return service.completed(id, owner).metadata


@routes.post("/v1/videos/{id}/verify", status_code=202)
def verify_video(id: str, service: ServiceDep, owner: OwnerDep) -> Video:
    """Make the clip again on one device, once the ranks are idle, and compare all bits."""
    return service.verify(id, owner)


def _check_streams(service: Service, owner: Owner) -> None:
    """Raise an `ApiError` if an owner, or all owners together, have too many open streams.

    Event streams and archives count as streams.

    Raises:
        ApiError: `MAX_STREAMS` or `MAX_STREAMS_OF_KEY` is reached.
    """
    subscribers, hint = service.subscribers, "poll GET /v1/videos/{id} instead"
    if owner.name and subscribers.count(owner.name) >= MAX_STREAMS_OF_KEY:
        limit = MAX_STREAMS_OF_KEY
        text = f"{limit} clients of this key follow clips or read archives already"
        raise ApiError(429, "too_many_streams", text, hint, retry=10, limit=limit)
    if subscribers.total >= MAX_STREAMS:
        text = f"{MAX_STREAMS} clients follow clips or read archives already"
        raise ApiError(503, "too_many_streams", text, hint, retry=10, limit=MAX_STREAMS)


class _Events(EventSourceResponse):
    # FastAPI writes this media type only into the OpenAPI document, for error responses. Events are
    # sent as text/event-stream.
    media_type = JSON_MEDIA_TYPE


def _check_followed(
    id: str, service: ServiceDep, owner: OwnerDep, last_id: LastEventId = None
) -> str:
    """Return the id of a job to follow; raise if there is no such job, or nothing left to send.

    FastAPI calls this function as a dependency of the route, so that errors are raised before the
    stream begins.

    Raises:
        ApiError: The owner has no such job, or too many streams are open.
        HTTPException: Status 204: the job has ended, and the client already has the last event.
    """
    job = service.job(id, owner)
    _check_streams(service, owner)
    if job.state.is_final and last_id == _event(service.video(job)).id:
        raise HTTPException(204)
    return job.id


@routes.get(
    "/v1/videos/{id}/events",
    response_class=_Events,
    responses={
        200: {
            "description": "Events named `video`, each with the video as JSON. After `DELETE`, "
            "the last event is named `deleted`, with the response of that request."
        },
        204: {"description": "The client already has the last event, and must not reconnect."},
    },
)
async def follow_video(
    id: Annotated[str, Depends(_check_followed)],
    service: ServiceDep,
    owner: OwnerDep,
    last_id: LastEventId = None,
) -> AsyncIterator[ServerSentEvent]:
    """Send a server-sent event with the video at each change, until the video has ended.

    A client that reconnects with `Last-Event-ID` gets an event at once if the video has changed
    since that event.
    """
    with service.subscribers.subscribe(owner.name):
        status = JobState.CANCELLED
        is_last = False
        while not is_last:
            # `is_closed` is read before the job. In the other order, the job could change in
            # between, and the stream would end without the job's last state.
            is_last = service.subscribers.is_closed
            try:
                job = await run_in_threadpool(service.queue.get, id)
                if job is None or job.remove_requested:
                    yield _deleted_event(id, status)
                    return
                status = job.state if job.state.is_final else JobState.CANCELLED
                event = _event(await run_in_threadpool(service.video, job))
            except OutputError:  # while the queue is unavailable, the stream stays open
                await service.subscribers.wait()
                continue
            if event.id != last_id:
                yield event
                last_id = event.id
            is_last |= job.state.is_final
            if not is_last:
                await service.subscribers.wait()


def _deleted_event(id: str, status: JobState) -> ServerSentEvent:
    data = DeletedVideo(id=id, status=status)
    return ServerSentEvent(event="deleted", data=data, id=f"{id}-deleted")


def _event(video: Video) -> ServerSentEvent:
    """Return a server-sent event with the state of a video.

    The id of the event is a hash of all fields except the ETA, which always changes.
    """
    state = video.model_copy(update={"eta_seconds": None}).model_dump_json()
    id = hashlib.sha256(state.encode()).hexdigest()[:16]
    return ServerSentEvent(event="video", data=video, id=id)
