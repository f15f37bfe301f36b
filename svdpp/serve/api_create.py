"""Owns the route that requests a clip, whose form is that of the server's model.

Without `from __future__ import annotations`: FastAPI could not find the form's class by its name.
"""

import shutil
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Form, Request, Response, UploadFile

from svdpp.errors import OutputError
from svdpp.media import output_files
from svdpp.serve.api_errors import ApiError, documented
from svdpp.serve.api_requests import IdempotencyKey, Owned, Served
from svdpp.serve.forms import VideoRequest
from svdpp.serve.guard import UPLOAD_PATH, Limits
from svdpp.serve.owner import Owner
from svdpp.serve.schemas import Video
from svdpp.serve.service import Service
from svdpp.serve.waiters import in_thread

_ANSWERS = {
    202: {
        "description": "Stored durably.",
        "headers": {"Location": {"schema": {"type": "string"}}},
    },
    **documented(400, 404, 408, 413, 415, 422, 429, 503),
}


def create_route(form_type: type[VideoRequest]) -> APIRouter:
    """The route with the form `form_type`."""
    routes = APIRouter(tags=["videos"])

    @routes.post(UPLOAD_PATH, status_code=202, responses=_ANSWERS)
    async def create_video(
        request: Request,
        response: Response,
        service: Served,
        owner: Owned,
        idempotency_key: IdempotencyKey,
        form: Annotated[form_type, Form(media_type="multipart/form-data")],  # type: ignore[valid-type]
    ) -> Video:
        """Requests a clip. It is stored durably before the answer."""
        _check_size(form, request.app.state.limits)
        video = await in_thread(_create, service, form, owner, idempotency_key)
        response.headers["Location"] = f"/v1/videos/{video.id}"
        return video

    return routes


def _check_size(form: VideoRequest, limits: Limits) -> None:
    size = 0 if form.photo is None else form.photo.size or 0
    if size > limits.upload_bytes:
        raise ApiError(
            413,
            "content_too_large",
            f"the photograph has {size} bytes, the limit is {limits.upload_bytes}",
            details={"limit_bytes": limits.upload_bytes},
        )


def _create(service: Service, form: VideoRequest, owner: Owner, key: str | None) -> Video:
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
    except OSError as error:
        output_files.remove(path)
        what = f"cannot store the photograph: {output_files.reason(error)}"
        raise OutputError(what, "the disk of the server may be full") from error
    except BaseException:
        output_files.remove(path)
        raise
