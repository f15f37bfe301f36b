"""HTTP middleware: checks of hosts and API keys, limits of bodies, response headers, access log."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from loguru import logger
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from svdpp.serve.auth import Owner, is_loopback
from svdpp.serve.metrics import Metrics
from svdpp.serve.schemas import ApiError, error_response

JSON_MEDIA_TYPE = "application/json"
#: Media types of a batch that is sent as the whole body: JSON Lines, with one request on each line.
LINES_MEDIA_TYPES = ("application/jsonl", "application/x-ndjson")
_FORM_MEDIA_TYPE = "multipart/form-data"
#: Media types that each route with uploads accepts, by the path of the route.
_UPLOAD_TYPES = {
    "/v1/videos": (_FORM_MEDIA_TYPE, JSON_MEDIA_TYPE),
    "/v1/videos/sync": (_FORM_MEDIA_TYPE, JSON_MEDIA_TYPE),
    "/v1/files": (_FORM_MEDIA_TYPE,),
    "/v1/batches": (*LINES_MEDIA_TYPES, _FORM_MEDIA_TYPE, JSON_MEDIA_TYPE),
}
_BATCH_PATHS = frozenset({"/v1/files", "/v1/batches"})
#: Default maximum size in bytes of a body with images.
DEFAULT_MAX_UPLOAD_BYTES = 32 * 2**20
#: Maximum number of concurrent uploads of images: in total, and with one API key.
MAX_UPLOADS = 32
MAX_UPLOADS_PER_KEY = 8
#: Maximum number of concurrent uploads of batch files: in total, and with one API key. A batch file
#: is in JSON Lines, with one request on each line.
MAX_BATCH_UPLOADS = 8
MAX_BATCH_UPLOADS_PER_KEY = 2
#: Maximum size in bytes of a body with a batch file.
MAX_BATCH_BYTES = 200 * 2**20
#: Maximum size in bytes of a JSON body, and of a line of a batch. Both are read into memory, unlike
#: a form.
MAX_JSON_BYTES = 16 * 2**20
#: Paths that need no API key. The files of the web page under `/page/` need none either.
_PUBLIC_PATHS = frozenset({"/", "/health", "/ready", "/openapi.json"})

#: Host name or IP address, with an optional port.
HOST_PATTERN = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_MAX_OTHER_BODY = 64 * 2**10
_IMAGE_TOO_LARGE = "make the image smaller: it need not be larger than the frames of the clip"
_BATCH_TOO_LARGE = "split the file into several batches"
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob:; "
    "media-src 'self' blob:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass
class AuthMiddleware:
    """ASGI middleware that checks API keys, limits the size of bodies, and logs requests.

    A request without a valid key is rejected before its body is read.

    Routes find the owner of the request's key in `scope["state"]["owner"]`.

    Args:
        app: Application to which accepted requests are forwarded.
        metrics: Metrics that count each request.
        upload_bytes: Maximum size in bytes of the body of a request for a clip.
        owner_of: Function that returns the owner of an API key, or None if the key is unknown. If
            `owner_of` itself is None, the server has no keys, and accepts only requests to loopback
            hosts.
    """

    app: ASGIApp
    metrics: Metrics
    upload_bytes: int = DEFAULT_MAX_UPLOAD_BYTES
    owner_of: Callable[[str], Owner | None] | None = None
    _uploads: Counter[str] = field(default_factory=Counter)
    """Number of image uploads in progress, by the owner's name."""
    _batch_uploads: Counter[str] = field(default_factory=Counter)
    """Number of uploads of batch files in progress, by the owner's name."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate one request, limit its body, forward it to the application, and log it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        response = _ResponseRecorder(scope, send)
        try:
            await self._serve(scope, receive, response)
        finally:
            self._log_request(scope, response)

    async def _serve(self, scope: Scope, receive: Receive, response: _ResponseRecorder) -> None:
        headers = Headers(scope=scope)
        path = scope["path"]
        is_upload = scope["method"] == "POST" and path in _UPLOAD_TYPES
        with ExitStack() as upload:
            try:
                owner = self._authenticate(path, headers)
                scope.setdefault("state", {}).update(owner=owner, upload=upload)
                if is_upload:
                    self._reserve_upload(owner.name, upload, is_batch=path in _BATCH_PATHS)
                body = _limit_body(receive, *self._body_limit(headers, path if is_upload else ""))
            except ApiError as error:
                await error_response(error)(scope, receive, response)
            else:
                # A HEAD request is forwarded as GET, and uvicorn drops the body of the response.
                # Event streams are excluded, because they never end. Archives are excluded, because
                # their files would be read for nothing.
                streams = ("/events", "/archive")
                is_head = scope["method"] == "HEAD" and not scope["path"].endswith(streams)
                forwarded_scope = {**scope, "method": "GET"} if is_head else scope
                await self.app(forwarded_scope, body, response)
                scope["route"] = forwarded_scope.get("route")

    def _reserve_upload(self, owner: str, upload: ExitStack, *, is_batch: bool) -> None:
        """Count an upload as in progress until the stack `upload` is closed.

        The number of uploads in progress is limited, in total and for each owner.

        Raises:
            ApiError: Too many uploads are in progress already. This upload is not counted.
        """
        uploads = self._batch_uploads if is_batch else self._uploads
        what = "batches" if is_batch else "images"
        most = MAX_BATCH_UPLOADS if is_batch else MAX_UPLOADS
        most_of_key = MAX_BATCH_UPLOADS_PER_KEY if is_batch else MAX_UPLOADS_PER_KEY
        limits = [(503, uploads.total(), most, "")]
        if self.owner_of is not None:
            limits.insert(0, (429, uploads[owner], most_of_key, "of this key "))
        for status, in_use, limit, qualifier in limits:
            if in_use >= limit:
                text = f"{in_use} {what} {qualifier}are being uploaded already"
                raise ApiError(status, "too_many_uploads", text, retry=1, limit=limit)
        uploads[owner] += 1
        upload.callback(uploads.subtract, [owner])

    def _authenticate(self, path: str, headers: Headers) -> Owner:
        """Return the owner of a request's API key; raise an `ApiError` if the key is not valid.

        If the server has no keys, or the path is public, the owner's name is empty.

        Raises:
            ApiError: The key is missing or unknown. If the server has no keys: the request's Host
                is not a loopback host, or its Origin is another website.
        """
        if self.owner_of is None:
            _check_host(headers)
            return Owner()
        if path in _PUBLIC_PATHS or path.startswith("/page/"):
            return Owner()
        scheme, _, key = headers.get("authorization", "").partition(" ")
        owner = self.owner_of(key.strip()) if scheme.lower() == "bearer" and key else None
        if owner is None:
            text = "the API key is unknown" if key else "an API key is needed"
            hint = "send the header Authorization: Bearer KEY"
            challenge = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, "invalid_api_key", text, hint, headers=challenge)
        return owner

    def _body_limit(self, headers: Headers, upload_path: str) -> tuple[int, str]:
        """Return the maximum bytes of a request's body, and a hint for clients that exceed it.

        Args:
            headers: Headers of the request.
            upload_path: Path of the route if the route accepts uploads; otherwise empty.

        Raises:
            ApiError: The body is too large according to Content-Length, the route does not accept
                its media type, or the request has both Content-Length and Transfer-Encoding.
        """
        limit, hint = _MAX_OTHER_BODY, ""
        if upload_path:
            kind = _media_type_of(headers.get("content-type", ""), upload_path)
            if upload_path not in _BATCH_PATHS:
                limit, hint = self.upload_bytes, _IMAGE_TOO_LARGE
                if kind == JSON_MEDIA_TYPE:
                    limit = min(limit * 4 // 3, MAX_JSON_BYTES)
            elif kind != JSON_MEDIA_TYPE:
                limit, hint = MAX_BATCH_BYTES, _BATCH_TOO_LARGE
        if "content-length" in headers and "transfer-encoding" in headers:
            # A request with both headers is rejected to prevent request smuggling: a proxy and this
            # server could use different headers, and disagree on where the request ends.
            text = "a request must not have both Content-Length and Transfer-Encoding"
            raise ApiError(400, "two_lengths", text, headers={"Connection": "close"})
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > limit:
            raise _content_too_large(limit, hint)
        return limit, hint

    def _log_request(self, scope: Scope, response: _ResponseRecorder) -> None:
        route = getattr(scope.get("route"), "path", "other")
        # If no status was sent, the client has disconnected. Such requests count as status 499.
        status = response.status or 499
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self.metrics.count_request(method, route, status, response.seconds)
        # Successful GET requests are not logged, because clients that poll would fill the log.
        if method not in ("GET", "HEAD") or status >= 400:
            logger.debug("{} {} {}", method, scope["path"], status)


class _ResponseRecorder:
    """Wrapper of ASGI's `send` that adds headers to a response, and records status and time."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.status = 0
        self._started_at = time.monotonic()
        self._responded_at: float | None = None
        self._is_api = scope["path"].startswith("/v1/")
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._responded_at = time.monotonic()
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            # The page's files are revalidated at each load, so that the page always has the
            # server's version.
            headers.setdefault("cache-control", "no-store" if self._is_api else "no-cache")
        await self._send(message)

    @property
    def seconds(self) -> float:
        """Seconds from the request to the start of the response, or to now if none has started."""
        until = time.monotonic() if self._responded_at is None else self._responded_at
        return until - self._started_at


def _limit_body(receive: Receive, limit: int, hint: str) -> Receive:
    num_bytes = 0

    async def receive_limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > limit:
            raise _content_too_large(limit, hint)
        return message

    return receive_limited


def _media_type_of(content_type: str, path: str) -> str:
    """Return the media type of a body with uploads; reject charsets other than UTF-8.

    Python would decode a form's fields with any codec that the header names, and some codecs take
    minutes per megabyte.

    Raises:
        ApiError: The route does not accept the media type or the charset.
    """
    kind, options = parse_options_header(content_type)
    shown = kind.decode(errors="replace")[:60]
    if shown not in _UPLOAD_TYPES[path]:
        text = f"Content-Type must be {' or '.join(_UPLOAD_TYPES[path])}, not {shown!r}"
        hint = "send a form, as curl -F does, with an image in the field input_reference"
        if path in _BATCH_PATHS:
            hint = "send the JSON Lines file in the form field file, as curl -F file=@FILE does"
        raise ApiError(415, "unsupported_media_type", text, hint)
    charset = options.get(b"charset", b"utf-8").decode(errors="replace")
    if charset.lower() not in ("utf-8", "utf8"):
        text = f"the body must be in UTF-8, not {charset[:60]!r}"
        raise ApiError(415, "unsupported_charset", text)
    return shown


def _content_too_large(limit: int, hint: str) -> ApiError:
    size = f"{limit / 2**20:.1f} MiB" if limit >= 2**20 else f"{limit} bytes"
    text = f"the body is larger than {size}"
    headers = {"Connection": "close"}
    return ApiError(413, "content_too_large", text, hint, limit_bytes=limit, headers=headers)


def _check_host(headers: Headers) -> None:
    """Reject a request to a host that is not a loopback host, or from a web page of another origin.

    This protects a server without API keys against web pages in the user's browser. A page could
    otherwise reach the server by DNS rebinding, or by submitting a form, which browsers allow
    without a CORS check.
    """
    host = headers.get("host", "")
    name = HOST_PATTERN.fullmatch(host)
    if name is None or not is_loopback(name[1].strip("[]")):
        text = f"a server without API keys can be reached as localhost only, not as {host[:100]!r}"
        hint = "use http://127.0.0.1 on the server's own machine"
        raise ApiError(403, "wrong_host", text, hint)
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        text = (
            f"this server has no API keys, so web pages of {origin[:100]!r} may not use it; only "
            "its own page may"
        )
        raise ApiError(403, "wrong_origin", text)
