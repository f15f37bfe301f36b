"""The errors of the API: one shape for every answer of 400 and above."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from loguru import logger
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Match

from svdpp.errors import (
    ClosedError,
    InputError,
    OutOfMemoryError,
    OutputError,
    RequestError,
    SvdppError,
    describe_fault,
    redact,
    redact_all,
    without_folders,
)
from svdpp.serve.database import AwayError
from svdpp.serve.photos import DecoderBusyError
from svdpp.serve.views import FIELDS

#: Kind of the error, for people, by status.
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
#: Status and code of what other layers raise; the first type that fits.
_RAISED: Sequence[tuple[type[SvdppError], int, str]] = (
    (OutOfMemoryError, 422, "too_large_for_memory"),
    (InputError, 422, "invalid_image"),
    (RequestError, 422, "invalid_request"),
    (ClosedError, 503, "closing"),
    (DecoderBusyError, 503, "decoder_busy"),
)
#: Answers that are no faults: a client that tries again must not fill the log.
_REFUSALS = (ClosedError, DecoderBusyError, AwayError)
_RETRY_SECONDS = 10
#: An option of the command line. A limit of the server is named as whoever started it knows it.
_OPTION = re.compile(r"--(?!max-megapixels)(?:param )?([a-z][a-z0-9_-]*)")
_KNOWN = FIELDS | {"height", "width"}


class ApiError(SvdppError):
    """A request that is answered by an error; `code` is for programs, such as `queue_full`.

    `retry` are the seconds after which the same request may succeed.
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


def error_answer(error: ApiError) -> JSONResponse:
    """The answer for `error`."""
    kind = _TYPES.get(error.status)
    if kind is None:
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
    body = {
        "type": kind,
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "details": error.details,
    }
    return JSONResponse({"error": redact_all(body)}, error.status, headers=error.headers)


def as_api_error(error: SvdppError) -> ApiError:
    """`error` of another layer by the names of the API."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OutputError):  # its message names files of the server: only for the log
        text = "the server cannot store its data"
        return ApiError(503, "storage_failed", text, retry=_RETRY_SECONDS)
    message, hint = without_folders(error.message), without_folders(error.hint)
    for kind, status, code in _RAISED:
        if isinstance(error, kind):
            details = {**(_field_at_fault(error) if status == 422 else {}), **error.details}
            # What only whoever starts the server can do is no help.
            hint = hint if all(name in _KNOWN for name in _options_in(hint)) else ""
            texts = _without_options(message), _without_options(hint)
            retry = _RETRY_SECONDS if status == 503 else None
            return ApiError(status, code, *texts, retry=retry, **details)
    return ApiError(500, "internal_error", message, hint, **error.details)


def install(app: FastAPI) -> None:
    """Makes `app` answer every error by `error_answer`."""
    app.add_exception_handler(SvdppError, _on_svdpp_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unexpected)


def _options_in(text: str) -> list[str]:
    return [name.replace("-", "_") for name in _OPTION.findall(text)]


def _without_options(text: str) -> str:
    """`text` with the fields of requests in place of the options that they are."""
    text = _OPTION.sub(lambda match: match[1].replace("-", "_"), text)
    return text.replace("num_inference_steps", "steps").replace("num_frames", "frames")


def _field_at_fault(error: SvdppError) -> dict[str, str]:
    """The first field of the form that `error` names as an option; empty if it names none."""
    if isinstance(error, InputError):
        return {"field": "input_reference"}
    for name in _options_in(f"{error.message} {error.hint}"):
        if name in _KNOWN:
            return {"field": "size" if name in ("width", "height") else name}
    return {}


async def _on_svdpp_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, SvdppError)
    api_error = as_api_error(error)
    if api_error.status >= 500 and not isinstance(error, (ApiError, *_REFUSALS)):
        logger.error("{} {}: {}", request.method, request.url.path, redact(error.message))
    return error_answer(api_error)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:  # noqa: ARG001
    assert isinstance(error, RequestValidationError)
    faults = [{**fault, "loc": fault["loc"][1:] or fault["loc"]} for fault in error.errors()]
    return error_answer(invalid_request(map(in_words, faults)))


def invalid_request(faults: Iterable[Mapping[str, str]]) -> ApiError:
    """The answer for fields at fault, each by `in_words`."""
    faults = list(faults)
    message = "; ".join(f"{fault['field']} {fault['reason']}" for fault in faults[:5])
    return ApiError(422, "invalid_request", message, faults=faults[:20])


def in_words(fault: Mapping[str, Any]) -> dict[str, str]:
    """One of pydantic's faults in plain words."""
    shown = {**fault, "input": _short(fault.get("input"))}
    return {"field": ".".join(map(str, fault["loc"])), "reason": describe_fault(shown)}


def _short(value: Any) -> Any:
    if isinstance(value, list | dict):
        return "..."
    return f"{value[:60]}..." if isinstance(value, str) and len(value) > 60 else value


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    if status < 400:
        return Response(status_code=status)
    phrase = HTTPStatus(status).phrase.lower()
    path = redact(request.url.path)
    message = {
        404: f"there is no {path}",
        405: f"{request.method} is not allowed for {path}",
    }.get(status, str(error.detail) or phrase)
    headers = error.headers
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers = {"Allow": ", ".join(_methods(request))}
    code = phrase.replace(" ", "_").replace("-", "_")
    hint = "the routes are in /openapi.json" if status in (404, 405) else ""
    return error_answer(ApiError(status, code, message, hint, headers=headers))


def _methods(request: Request) -> list[str]:
    """Those that the path has; Starlette names only those of the first route that has it."""
    routes: Sequence[BaseRoute] = request.app.routes
    methods = [
        method
        for method in ("DELETE", "GET", "POST")
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes
        )
    ]
    return sorted([*methods, "HEAD"]) if "GET" in methods else methods  # of HEAD: `guard`


async def _on_unexpected(request: Request, error: Exception) -> JSONResponse:
    # Not by loguru's own format, which shows the values of variables: keys are among them.
    trace = "".join(traceback.format_exception(error))
    logger.error("{} {} failed: {}", request.method, request.url.path, trace)
    message = f"unexpected {type(error).__name__}"
    return error_answer(ApiError(500, "internal_error", message, "the server's log has the reason"))
