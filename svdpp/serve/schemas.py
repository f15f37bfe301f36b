"""Response models of the API: videos, batches and errors; names of request fields."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal, cast

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from loguru import logger
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from svdpp import errors
from svdpp.config import (
    SAMPLING_CLASSES,
    Fit,
    Lora,
    PromptedSampling,
    SamplingConfig,
    configuration_fields,
    params_of,
)
from svdpp.config.pipeline import LAST_IMAGE, REFERENCES, reference_names
from svdpp.config.sampling import params_by_field
from svdpp.errors import (
    SvdppError,
    describe_fault,
    fields_in,
    filter_hint,
    redact,
    redact_all,
    without_folders,
    write_fields,
)
from svdpp.serve.batch_table import Batch, BatchCounts, BatchState
from svdpp.serve.job import Job, JobState, UnreadableJobError, VerificationStatus
from svdpp.serve.sqlite import BackendUnavailableError, StorageUnavailableError
from svdpp.serve.uploads import DecoderBusyError

#: Field `type` of an error by HTTP status.
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
#: HTTP status and error code for each error of svdpp except `ApiError`. The first entry whose class
#: matches the error is used.
_STATUS_BY_ERROR: Sequence[tuple[type[SvdppError], int, str]] = (
    (errors.OutOfMemoryError, 422, "too_large_for_memory"),
    (errors.InputError, 422, "invalid_image"),
    (errors.RequestError, 422, "invalid_request"),
    (StorageUnavailableError, 503, "storage_unavailable"),
    (UnreadableJobError, 503, "newer_video"),
    (errors.OutputError, 503, "storage_failed"),
    (errors.ClosedError, 503, "closing"),
    (DecoderBusyError, 503, "decoder_busy"),
    (SvdppError, 500, "internal_error"),
)
#: Errors that are not logged, because clients that retry would fill the log with them.
_EXPECTED_ERRORS = (errors.ClosedError, DecoderBusyError, BackendUnavailableError)
# Value of the Retry-After header in responses with status 503, in seconds.
_RETRY_SECONDS = 10

#: Name of the request field with the image, or with the video if the model takes a video.
IMAGE_FIELD = "input_reference"

#: Names of the request fields of all models.
FIELDS = frozenset(
    {"model", "seed", "seconds", "size", "user", "priority", "callback_url", "lora"}
    | {IMAGE_FIELD, LAST_IMAGE, REFERENCES, "fit", "prompt", "negative_prompt"}
).union(*((*params_by_field(kind), *kind.videos) for kind in SAMPLING_CLASSES.values()))

#: Names of request fields, by the names of the corresponding configuration fields.
_REQUEST_NAMES = {name: name for name in configuration_fields()} | {
    name: param.field
    for kind in cast("Iterable[Any]", SAMPLING_CLASSES.values())
    for name, param in params_of(kind).items()
}
_REQUEST_NAMES["loras"] = "lora"


def write_request_fields(text: str) -> str:
    """Replace the names of configuration fields in a message by the names of request fields.

    Args:
        text: Message or remark with names of configuration fields in backticks.
    """
    return write_fields(text, _REQUEST_NAMES)


# --- response models of videos --------------------------------------------------------------------


class ErrorBody(BaseModel):
    """Error of a request or of a failed clip."""

    code: str
    message: str
    hint: str = ""
    details: dict[str, Any] = {}


class Video(BaseModel):
    """Requested clip, with the parameters and prompts of its family. Times are Unix seconds."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True, extra="allow")

    id: str
    object: Literal["video"] = "video"
    model: str
    status: JobState
    progress: Annotated[int, Field(description="Progress in percent.")]
    created_at: int
    started_at: int | None
    completed_at: int | None
    expires_at: int | None
    size: str
    seconds: str
    frames: int
    fps: int | float
    steps: int
    seed: int
    fit: Fit
    priority: int
    place: Annotated[
        int | None, Field(description="Number of clips that begin before this one.")
    ] = None
    cancel_requested: Annotated[
        bool,
        Field(description="Whether a client has cancelled the clip, but ranks still work on it."),
    ] = False
    held: Annotated[
        str | None,
        Field(description="Reason why no live server can make the clip; null: a server can."),
    ] = None
    eta_seconds: float | None
    step: int
    rank: int | None = None
    input: Annotated[
        dict[str, str] | None, Field(description="Input image or video: its name and SHA-256.")
    ]
    remarks: Annotated[
        list[str],
        Field(description="Changes to the input that a client may not expect, such as cropping."),
    ] = []
    error: ErrorBody | None
    proof: VerificationStatus
    proof_reason: Annotated[
        str | None, Field(description="Reason if `proof` is `failed` or `different`.")
    ]
    callback: Annotated[
        dict[str, Any] | None, Field(description="State of the webhook; null: none was requested.")
    ]
    batch_id: Annotated[str | None, Field(description="Id of the video's batch; null: none.")] = (
        None
    )
    custom_id: Annotated[
        str | None, Field(description="Name that the client gave to the video's line in the batch.")
    ] = None


def params_to_json(sampling: SamplingConfig) -> dict[str, Any]:
    """Return the parameters of a clip, or a model's defaults, by the names of request fields."""
    params = params_by_field(type(sampling))
    return {
        **{field: getattr(sampling, param.name) for field, param in params.items()},
        "size": format_size(sampling.width, sampling.height),
        "seconds": f"{sampling.frames / sampling.fps:.2f}",  # text, as in OpenAI's API
        "fit": sampling.fit,
    }


def format_size(width: int, height: int) -> str:
    """Return a size in pixels as the API writes it, such as `832x480`.

    Args:
        width: Width in pixels.
        height: Height in pixels.
    """
    return f"{width}x{height}"


def video_from_job(
    job: Job,
    *,
    step: int = 0,
    eta_seconds: float | None = None,
    expires_at: float | None = None,
    **more: Any,
) -> Video:
    """Convert a job of the queue to the `Video` that the API shows.

    Args:
        job: Job of the queue.
        step: Number of finished steps.
        eta_seconds: Seconds until the clip is completed; None: unknown, or the job is final.
        expires_at: Unix time at which the files of a final job are removed; None: never, or the job
            is not final.
        more: Further fields of an open job: `place` (number of clips that begin before it), `held`
            (reason why no server can make the clip) and `rank` (rank that works on the clip).
    """
    is_done = job.state is JobState.COMPLETED
    steps = job.sampling.num_inference_steps
    step = steps if is_done else min(step, steps)
    if (held := more.get("held")) is not None:
        more["held"] = write_request_fields(held)
    values = params_to_json(job.sampling) | more
    further = {name: {"sha256": sha256} for name, sha256 in job.further_inputs.items()}
    if LAST_IMAGE in further:
        values[LAST_IMAGE] = further.pop(LAST_IMAGE)
    if names := reference_names(job.sampling.num_references):
        values[REFERENCES] = [further.pop(name) for name in names]
    if further:
        values["videos"] = further
    if job.loras:
        values["lora"] = list(map(_lora_to_json, job.loras))
    if isinstance(job.sampling, PromptedSampling):
        values |= {"prompt": job.prompt, "negative_prompt": job.negative_prompt}
    return Video(
        id=job.id,
        model=job.model,
        status=job.state,
        progress=100 if is_done else min(99, 100 * step // steps),
        created_at=int(job.created_at),
        started_at=_to_int(job.started_at),
        completed_at=_to_int(job.finished_at) if is_done else None,
        expires_at=_to_int(expires_at),
        **values,
        input={"name": job.input_name, "sha256": job.input_sha256} if job.input_file else None,
        remarks=job.remarks,
        seed=job.seed,
        priority=job.priority,
        eta_seconds=None if eta_seconds is None else round(max(0.0, eta_seconds), 3),
        step=step,
        cancel_requested=job.cancel_requested and not job.state.is_final,
        error=None if job.error is None else error_body(job.error),
        proof=job.verification,
        proof_reason=job.verification_reason,
        callback=_callback_status(job),
        batch_id=job.batch_id,
        custom_id=job.custom_id,
    )


def _lora_to_json(lora: Lora) -> dict[str, Any]:
    expert = {} if lora.expert is None else {"expert": lora.expert}
    return {"name": lora.name, "scale": lora.weight, **expert, "sha256": lora.sha256}


def _to_int(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)


def _callback_status(job: Job) -> dict[str, Any] | None:
    if job.callback_url is None or job.state is JobState.CANCELLED:
        return None
    settled = "failed" if job.callback_error else "delivered"
    return {
        "url": job.callback_url,
        "status": settled if job.callback_due is None else "pending",
        "attempts": job.callback_attempts,
        "error": job.callback_error,
    }


def error_body(record: dict[str, Any]) -> ErrorBody:
    """Convert an error from `errors.error_to_dict` to the API's form, without paths of folders.

    Args:
        record: Dict that `errors.error_to_dict` returned.
    """
    shown = redact_all(record, without_folders)
    shown |= {name: write_request_fields(shown[name]) for name in ("message", "hint")}
    return ErrorBody(code=shown.pop("type") or "SvdppError", **shown)


class VideoPage(BaseModel):
    """Page of the list of videos."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedVideo(BaseModel):
    """Response to `DELETE`. With status 202 the files are removed a little later."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True
    status: Annotated[
        JobState, Field(description="Status before the removal; `cancelled` if it had not ended.")
    ]


# --- response models of batches -------------------------------------------------------------------

BatchStatus = Literal["validating", "failed", "in_progress", "completed", "cancelling", "cancelled"]


class LineError(BaseModel):
    """Error in a batch's results: the reason why a line has no clip."""

    code: str
    message: str


class BatchLineResult(BaseModel):
    """Line of a batch's output file, or of its file of errors."""

    id: str
    custom_id: str
    response: Annotated[
        dict[str, Any] | None,
        Field(description="Object with `status_code`, `request_id` and the video as `body`."),
    ]
    error: LineError | None


class BatchFault(BaseModel):
    """Fault that made a batch fail. Most faults are in a line; some concern the whole batch."""

    code: str
    message: str
    line: Annotated[
        int | None,
        Field(description="Number of the line in the file, from 1; null: the whole batch."),
    ]
    param: str | None = None
    hint: str = ""
    custom_id: str | None = None


class BatchFaults(BaseModel):
    """List of the faults that made a batch fail."""

    object: Literal["list"] = "list"
    data: list[BatchFault]


class BatchRequestCounts(BaseModel):
    """Numbers of all, completed and failed lines of a batch."""

    total: int
    completed: int
    failed: Annotated[int, Field(description="Number of lines that failed or were cancelled.")]


class BatchView(BaseModel):
    """Batch in the format of OpenAI's API. Times are unix seconds."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Literal["/v1/videos"] = "/v1/videos"
    model: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: Annotated[
        None, Field(description="Always null, because batches do not expire.")
    ] = None
    finalizing_at: Annotated[
        None, Field(description="Always null, because result files are available at once.")
    ] = None
    completed_at: int | None
    failed_at: int | None
    expired_at: None = None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchRequestCounts
    metadata: dict[str, str] | None


class BatchPage(BaseModel):
    """Page of the list of batches."""

    object: Literal["list"] = "list"
    data: list[BatchView]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileView(BaseModel):
    """Response that describes a file of requests, as OpenAI's API does. Times are Unix seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class DeletedFile(BaseModel):
    """Response to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


#: Suffixes of the ids of a batch's two result files. The value is True for the file with the failed
#: lines, and False for the file with the completed lines.
OUTPUT_FILES = {"_output": False, "_error": True}


def batch_view(batch: Batch, counts: BatchCounts, model: str) -> BatchView:
    """Convert a batch to the `BatchView` that the API shows.

    Args:
        batch: Batch from the table.
        counts: Numbers of the batch's jobs by state.
        model: Name of the batch's model.
    """
    status = _batch_status(batch, counts)
    has_ended = status in ("completed", "failed", "cancelled") and not counts.open
    stem = f"file_{batch.id.removeprefix('batch_')}"
    output, error = (f"{stem}{end}" for end in OUTPUT_FILES)
    end = counts.last_end or batch.stored_at
    return BatchView(
        id=batch.id,
        model=model,
        errors=BatchFaults.model_validate({"data": batch.errors}) if batch.errors else None,
        input_file_id=batch.input_file,
        completion_window=batch.completion_window,
        status=status,
        output_file_id=output if has_ended and counts.completed else None,
        error_file_id=error if has_ended and counts.failed else None,
        created_at=int(batch.created_at),
        in_progress_at=_to_int(batch.stored_at),
        completed_at=_to_int(end) if status == "completed" else None,
        failed_at=_to_int(batch.failed_at),
        cancelling_at=_to_int(batch.cancelled_at),
        cancelled_at=(
            _to_int(max(batch.cancelled_at or 0.0, end or 0.0)) if status == "cancelled" else None
        ),
        request_counts=BatchRequestCounts(
            total=batch.total, completed=counts.completed, failed=counts.failed
        ),
        metadata=batch.metadata or None,
    )


def _batch_status(batch: Batch, counts: BatchCounts) -> BatchStatus:
    if batch.state is BatchState.FAILED:
        return "failed"
    if batch.cancelled_at is not None:
        return "cancelling" if counts.open else "cancelled"
    if batch.state is BatchState.VALIDATING:
        return "validating"
    return "in_progress" if counts.open else "completed"


# --- errors: every response of 400 and above has the same form ------------------------------------


class TypedError(ErrorBody):
    """Error in a response of the API, with its `type`."""

    type: str


class ErrorResponse(BaseModel):
    """Body of every response with a status of 400 or above."""

    error: TypedError


class ApiError(SvdppError):
    """Exception for an error response of the API, with its HTTP status and code.

    Args:
        status: HTTP status.
        code: Identifier for programs, such as `queue_full`.
        message: One sentence that says what is wrong.
        hint: Advice for the client; "": no advice.
        retry: Seconds after which the same request may succeed (Retry-After); None: never.
        headers: Further headers of the response.
        details: Values for programs, by name.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        hint: str = "",
        /,
        *,
        retry: int | None = None,
        headers: Mapping[str, str] | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message, hint, details=details)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})
        if retry is not None:
            self.headers["Retry-After"] = str(retry)


def error_response(error: ApiError) -> JSONResponse:
    """Return the HTTP response with the JSON body for an `ApiError`."""
    otherwise = "server_error" if error.status >= 500 else "invalid_request_error"
    body = {
        "type": _TYPES.get(error.status, otherwise),
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "details": error.details,
    }
    return JSONResponse({"error": redact_all(body)}, error.status, headers=error.headers)


def to_api_error(error: SvdppError) -> ApiError:
    """Convert an error of svdpp to an error of the API; an `ApiError` is returned unchanged."""
    if isinstance(error, ApiError):
        return error
    status, code = next(
        (status, code) for kind, status, code in _STATUS_BY_ERROR if isinstance(error, kind)
    )
    message = write_request_fields(without_folders(error.message))
    hint = filter_hint(error.hint, _is_for_clients) if status == 422 else error.hint
    hint = write_request_fields(without_folders(hint))
    details = error.details
    if code == "storage_failed":  # the message, which names files of the server, is only logged
        message, hint, details = "the server cannot store its data", "", {}
    if code == "storage_unavailable":
        message, hint, details = "the server cannot reach its files", "try again later", {}
    if status == 422:
        details = {**details, **_find_field(error)}
    retry = _RETRY_SECONDS if status == 503 else None
    return ApiError(status, code, message, hint, retry=retry, **details)


_REQUEST_FIELDS = FIELDS | {"height", "width"}


def _is_for_clients(proposal: str) -> bool:
    """Whether a proposal of a hint names only request fields, and no option of the server."""
    fields = {_REQUEST_NAMES.get(name, name) for name in fields_in(proposal)}
    return fields <= _REQUEST_FIELDS and "--" not in proposal


def _find_field(error: SvdppError) -> dict[str, str]:
    """Return `{"field": NAME}` with the request field that an error is about; empty if unknown."""
    named = [error.field, *fields_in(error.message), *fields_in(error.hint)]
    if isinstance(error, errors.InputError):
        named = [error.details.get("field"), IMAGE_FIELD]
    for name in filter(None, named):
        field = _REQUEST_NAMES.get(name, name)
        if field in _REQUEST_FIELDS:
            return {"field": "size" if field in ("width", "height") else field}
    return {}


def invalid_request(faults: Iterable[Mapping[str, Any]], hint: str = "") -> ApiError:
    """Return the `ApiError` for a request whose fields pydantic has rejected.

    Args:
        faults: Entries of pydantic's `errors()`.
        hint: Advice for the client; "": no advice.
    """
    reported = [
        {"field": ".".join(map(str, fault["loc"])) or "body", "reason": describe_fault(fault)}
        for fault in faults
    ]
    message = "; ".join(f"{fault['field']} {fault['reason']}" for fault in reported[:5])
    return ApiError(422, "invalid_request", message, hint, faults=reported[:20])


def install_error_handlers(app: FastAPI) -> None:
    """Register handlers, so that `app` sends every error as an `ErrorResponse`."""
    app.add_exception_handler(SvdppError, _on_svdpp_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unexpected)


async def _on_svdpp_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, SvdppError)
    api_error = to_api_error(error)
    if api_error.status >= 500 and not isinstance(error, (ApiError, *_EXPECTED_ERRORS)):
        logger.error("{} {}: {}", request.method, request.url.path, redact(error.message))
    return error_response(api_error)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:  # noqa: ARG001
    assert isinstance(error, RequestValidationError)
    # The first part of a fault's location, such as "query" in ("query", "limit"), is dropped, so
    # that the error names only the field.
    located = [{**fault, "loc": fault["loc"][1:]} for fault in error.errors()]
    return error_response(invalid_request(located))


async def _on_http_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    assert isinstance(error, HTTPException)
    status = error.status_code
    if status < 400:
        return Response(status_code=status)
    code = re.sub("[ -]", "_", HTTPStatus(status).phrase.lower())
    return error_response(ApiError(status, code, error.detail, headers=error.headers))


async def _on_unexpected(request: Request, error: Exception) -> JSONResponse:
    # The traceback is formatted here, because loguru's own format shows the values of variables,
    # such as API keys.
    trace = "".join(traceback.format_exception(error))
    logger.error("{} {} failed: {}", request.method, request.url.path, trace)
    message = f"unexpected {type(error).__name__}"
    return error_response(
        ApiError(500, "internal_error", message, "the server's log has the reason")
    )
