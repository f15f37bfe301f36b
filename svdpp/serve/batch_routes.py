"""HTTP routes for batches, and for files of requests and results, as in OpenAI's Batch API."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, BinaryIO, Literal, cast

from fastapi import APIRouter, Query, Request, Response, UploadFile
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from svdpp.errors import OutputError
from svdpp.media import output_files
from svdpp.serve.auth import Owner
from svdpp.serve.batch_table import Batch, BatchFile
from svdpp.serve.files import PrivateFile
from svdpp.serve.middleware import JSON_MEDIA_TYPE, LINES_MEDIA_TYPES
from svdpp.serve.request_schema import parse_json, without_repetition
from svdpp.serve.routes import (
    IdempotencyKey,
    OwnerDep,
    ServiceDep,
    check_idempotency_key,
    run_in_own_thread,
)
from svdpp.serve.schemas import (
    OUTPUT_FILES,
    ApiError,
    BatchPage,
    BatchView,
    DeletedFile,
    FileView,
    batch_view,
    invalid_request,
)
from svdpp.serve.service import Service

routes = APIRouter(tags=["batches"])

_LINES_TYPE = LINES_MEDIA_TYPES[0]
# Limits of `metadata` as in OpenAI's API: number of pairs, characters of a name and of a value.
_MAX_PAIRS, _MAX_NAME, _MAX_VALUE = 16, 64, 512
# Size in bytes above which a body is kept in a temporary file instead of memory.
_SPOOL_BYTES = 2**20


def _parse_metadata(value: Any) -> Any:
    """Parse a batch's `metadata` if it is JSON text, as forms send it; else return it unchanged."""
    return parse_json(value.encode()) if isinstance(value, str) else value


def _check_file(value: Any) -> Any:
    """Raise a `ValueError` unless the value of a form's field is an uploaded file, not text."""
    if not hasattr(value, "filename"):
        raise ValueError("send a file, as curl -F file=@FILE does")
    return value


_Name = Annotated[str, Field(max_length=_MAX_NAME)]
_Value = Annotated[str, Field(max_length=_MAX_VALUE)]
_Upload = Annotated[
    UploadFile,
    BeforeValidator(_check_file),
    Field(description="File of request lines, each a JSON object."),
]


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    endpoint: Annotated[
        Literal["/v1/videos"], Field(description="API route of the requests in the lines.")
    ] = "/v1/videos"
    completion_window: Annotated[
        str, Field(pattern=r"^[1-9][0-9]{0,3}[hd]$", description="Accepted, but has no effect.")
    ] = "24h"
    metadata: Annotated[
        Annotated[dict[_Name, _Value], Field(max_length=_MAX_PAIRS)] | None,
        BeforeValidator(_parse_metadata),
        Field(description="Text values by name, which all responses about the batch include."),
    ] = None


class BatchRequest(_Options):
    """Body of `POST /v1/batches` as JSON."""

    input_file_id: Annotated[str, Field(description="Id of the file of request lines.")]


class BatchForm(_Options):
    """Body of `POST /v1/batches` as a form."""

    file: _Upload


class FileForm(BaseModel):
    """Body of `POST /v1/files`."""

    model_config = ConfigDict(extra="forbid")

    file: _Upload
    purpose: Annotated[Literal["batch"], Field(description="Purpose of the file.")]


def _body(**kinds: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI description of the body of a request for a batch or a file.

    Args:
        kinds: Schema of the body for each accepted media type: `form`, `json` or `lines`.
    """
    names = {"form": "multipart/form-data", "json": JSON_MEDIA_TYPE, "lines": _LINES_TYPE}
    content = {names[name]: {"schema": schema} for name, schema in kinds.items()}
    return {"requestBody": {"required": True, "content": content}}


_LINES_SCHEMA = {"type": "string", "format": "binary", "description": "One JSON object a line."}


# --- routes of files ------------------------------------------------------------------------------


@routes.post("/v1/files", openapi_extra=_body(form=FileForm.model_json_schema()))
async def create_file(request: Request, service: ServiceDep, owner: OwnerDep) -> FileView:
    """Store a file of request lines.

    The lines are checked when a batch with the file is created.
    """
    async with _form(request) as fields:
        form = _validate(FileForm, fields)
        assert isinstance(form, FileForm)
        file = await run_in_own_thread(
            service.batches.files.add, form.file.file, form.file.filename or "", owner
        )
    return _file_view(service, file)


@routes.get("/v1/files/{id}")
def get_file(id: str, service: ServiceDep, owner: OwnerDep) -> FileView:
    """Show a file of request lines, or a file with the results of a batch."""
    if (results := _find_results(service, id, owner)) is None:
        return _file_view(service, service.batches.files.get(id, owner))
    batch, errors = results
    written = service.batches.results(batch, errors=errors, view=service.video)
    return FileView(
        id=id,
        bytes=sum(len(line.encode()) for line in written),
        created_at=int(batch.created_at),
        expires_at=None,
        filename=f"{batch.id}_{'error' if errors else 'output'}.jsonl",
        purpose="batch_output",
    )


@routes.get(
    "/v1/files/{id}/content",
    response_class=FileResponse,
    responses={200: {"content": {_LINES_TYPE: {"schema": _LINES_SCHEMA}}}},
)
def get_file_content(id: str, service: ServiceDep, owner: OwnerDep) -> Response:
    """Send a file of request lines, or a file with the results that a batch has so far."""
    if (results := _find_results(service, id, owner)) is None:
        file = service.batches.files.get(id, owner)
        path = service.batches.files.content(file)
        return PrivateFile(path, file.name, file.sha256, file.created_at, kind=_LINES_TYPE)
    batch, errors = results
    written = service.batches.results(batch, errors=errors, view=service.video)
    return StreamingResponse(written, media_type=_LINES_TYPE)


@routes.delete("/v1/files/{id}")
def delete_file(id: str, service: ServiceDep, owner: OwnerDep) -> DeletedFile:
    """Remove a file of request lines.

    A file with results cannot be removed here. It exists as long as the batch's videos.
    """
    service.batches.files.remove(id, owner)
    return DeletedFile(id=id)


def _find_results(service: Service, id: str, owner: Owner) -> tuple[Batch, bool] | None:
    """Return the batch that a results file belongs to, and whether the file is the error file.

    Returns:
        Batch and boolean; None: the id is not that of a file with results.

    Raises:
        ApiError: The owner has no such batch.
    """
    for end, errors in OUTPUT_FILES.items():
        if id.endswith(end):
            name = f"batch_{id.removeprefix('file_').removesuffix(end)}"
            batch = service.batches.table.get(name)
            if batch is None or batch.owner != owner.name:
                raise ApiError(404, "file_not_found", f"there is no file {id[:60]!r}")
            return batch, errors
    return None


def _file_view(service: Service, file: BatchFile) -> FileView:
    return FileView(
        id=file.id,
        bytes=file.bytes,
        created_at=int(file.created_at),
        expires_at=int(file.created_at + service.batches.keep_seconds),
        filename=file.name,
        purpose="batch",
    )


# --- routes of batches ----------------------------------------------------------------------------


@routes.post(
    "/v1/batches",
    openapi_extra=_body(
        json=BatchRequest.model_json_schema(),
        form=BatchForm.model_json_schema(),
        lines=_LINES_SCHEMA,
    ),
)
async def create_batch(
    request: Request, service: ServiceDep, owner: OwnerDep, key: IdempotencyKey = None
) -> BatchView:
    """Request many clips: one for each line of a stored file or of the body.

    The fields of all lines are checked before the response. If lines have faults, the response
    lists the faults of all lines.
    """
    check_idempotency_key(key)
    kind = request.headers["content-type"].partition(";")[0].strip().lower()
    values: dict[str, Any]
    if kind == JSON_MEDIA_TYPE:
        parsed = _validate(BatchRequest, _json_object(await request.body()))
        batch = await _create(service, owner, key, **parsed.model_dump(exclude={"endpoint"}))
    elif kind in LINES_MEDIA_TYPES:
        async with _spooled(request) as source:
            batch = await _create(service, owner, key, source=source)
    else:
        async with _form(request) as fields:
            form = _validate(BatchForm, fields)
            assert isinstance(form, BatchForm)
            values = form.model_dump(include={"completion_window", "metadata"})
            values |= {"source": form.file.file, "name": form.file.filename or ""}
            batch = await _create(service, owner, key, **values)
    return await run_in_own_thread(_view, service, batch)


async def _create(service: Service, owner: Owner, key: str | None, **values: Any) -> Batch:
    def create() -> Batch:
        return service.batches.create(owner, key, **values)

    return await run_in_own_thread(create)


@routes.get("/v1/batches")
def list_batches(
    service: ServiceDep,
    owner: OwnerDep,
    limit: Annotated[int, Query(ge=1, le=100, description="Maximum number of batches.")] = 20,
    after: Annotated[str | None, Query(description="Last id of the previous page.")] = None,
) -> BatchPage:
    """List the batches of this key, the newest first."""
    if after is not None:
        service.batches.get(after, owner)
    table = service.batches.table
    batches_and_next = table.page(owner.name, limit + 1, after)
    batches = batches_and_next[:limit]
    counts = table.counts([batch.id for batch in batches])
    model = service.capabilities.model
    return BatchPage(
        data=[batch_view(batch, counts[batch.id], model) for batch in batches],
        first_id=batches[0].id if batches else None,
        last_id=batches[-1].id if batches else None,
        has_more=len(batches_and_next) > limit,
    )


@routes.get("/v1/batches/{id}")
def get_batch(id: str, service: ServiceDep, owner: OwnerDep) -> BatchView:
    """Show a batch with its status, and the numbers of completed and failed lines."""
    return _view(service, service.batches.get(id, owner))


@routes.post("/v1/batches/{id}/cancel")
def cancel_batch(id: str, service: ServiceDep, owner: OwnerDep) -> BatchView:
    """Cancel the unfinished clips of a batch; finished clips stay.

    The status of the batch is `cancelling` while ranks still work on its clips. A repeated request
    changes nothing.
    """
    return _view(service, service.batches.cancel(id, owner))


def _view(service: Service, batch: Batch) -> BatchView:
    counts = service.batches.table.counts([batch.id])[batch.id]
    return batch_view(batch, counts, service.capabilities.model)


# --- reading of request bodies --------------------------------------------------------------------


@asynccontextmanager
async def _form(request: Request) -> AsyncIterator[dict[str, Any]]:
    """Yield the fields of a request's form; remove its temporary files after the `with` block."""
    try:
        form = await request.form()
    except (ClientDisconnect, HTTPException, OSError) as error:
        raise _body_error(error) from error
    try:
        yield without_repetition(form.multi_items())
    finally:
        await form.close()


@asynccontextmanager
async def _spooled(request: Request) -> AsyncIterator[BinaryIO]:
    """Yield a request's body as a temporary file, which is removed after the `with` block."""
    with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as spooled:
        file = UploadFile(cast("BinaryIO", spooled))
        try:
            async for part in request.stream():
                await file.write(part)
        except (ClientDisconnect, OSError) as error:
            raise _body_error(error) from error
        yield file.file


def _body_error(error: Exception) -> Exception:
    if isinstance(error, HTTPException):
        text = f"the body must be a form as multipart/form-data: {error.detail}"
        return ApiError(400, "invalid_form", text, reason=error.detail)
    if isinstance(error, ClientDisconnect):
        return HTTPException(400, "the client has disconnected")
    assert isinstance(error, OSError)
    text = f"cannot store the body: {output_files.error_reason(error)}"
    return OutputError(text, "the disk of the server may be full")


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        fields = parse_json(body)
        if not isinstance(fields, dict):
            raise ValueError("the JSON value is not an object")
    except ValueError as error:
        text = f"the body must be a JSON object: {error}"
        raise ApiError(400, "invalid_json", text, reason=str(error)) from None
    return fields


def _validate(model: type[BaseModel], fields: dict[str, Any]) -> BaseModel:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise invalid_request(error.errors(include_url=False)) from None
