"""HTTP responses with stored files; range requests and conditional requests (RFC 9110)."""

from __future__ import annotations

import mimetypes
import os
import re
from collections.abc import Iterable
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from fastapi import Response
from fastapi.responses import FileResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Receive, Scope, Send

from svdpp.errors import pluralize
from svdpp.media.kinds import read_signature, usual_suffix
from svdpp.serve.job import Job
from svdpp.serve.schemas import ApiError, error_response

# One range of a Range header. Its offsets have at most 18 digits, which suffice for any file.
_RANGE = re.compile(r"([0-9]{0,18})-([0-9]{0,18})")
# Maximum number of characters that a file name takes from a prompt.
_NAME_CHARACTERS = 60


class PrivateFile(FileResponse):
    """HTTP response with a stored file that never changes. The client may cache it for an hour.

    A Range header that cannot be parsed is ignored, as RFC 9110 (14.2) demands.
    """

    def __init__(
        self, path: Path, name: str, sha256: str, changed_at: float, kind: str = ""
    ) -> None:
        """Create the HTTP response with a stored file, with its headers for caches and downloads.

        Args:
            path: Path of the file.
            name: Readable file name under which a browser saves the download.
            sha256: Hash of the content, which becomes the ETag; empty if it is not known.
            changed_at: Unix time of the content's last change, for Last-Modified. The modification
                time of the file is not used, because it differs between copies of the file.
            kind: Media type; empty: the type is guessed from the suffix of `name`.
        """
        headers = {
            "Cache-Control": "private, max-age=3600, immutable",
            "Content-Disposition": content_disposition(name),
            "Last-Modified": formatdate(changed_at, usegmt=True),
        }
        if sha256:
            headers["ETag"] = f'"{sha256}"'
        # `guess_type` gets only the suffix. It would parse a whole name that begins with `data:`
        # as a URL.
        guessed = mimetypes.guess_type(f"file{Path(name).suffix}", strict=False)[0]
        kind = kind or guessed or "application/octet-stream"
        super().__init__(path, media_type=kind, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file, its requested ranges, or status 304 if the client has the file cached."""
        if self.stat_result is None:
            self.stat_result = os.stat(self.path)
            self.set_stat_headers(self.stat_result)
        headers = Headers(scope=scope)
        if self._is_cached(headers):
            kept = ("cache-control", "etag", "last-modified")
            kept_headers = {name: self.headers[name] for name in kept}
            await Response(status_code=304, headers=kept_headers)(scope, receive, send)
            return
        if (text := headers.get("range")) is not None:
            size = self.stat_result.st_size
            ranges = _ranges(text, size) if self._range_applies(headers) else None
            if ranges == []:
                has = pluralize(size, "byte")
                message = f"the range {text[:60]!r} is outside of the file, which has {has}"
                range_headers = {"Content-Range": f"bytes */{size}"}
                error = ApiError(
                    416, "range_not_satisfiable", message, headers=range_headers, bytes=size
                )
                await error_response(error)(scope, receive, send)
                return
            scope = {**scope, "headers": list(scope["headers"])}
            if ranges is None:
                del MutableHeaders(scope=scope)["range"]
            else:
                MutableHeaders(scope=scope)["range"] = f"bytes={','.join(ranges)}"
        await super().__call__(scope, receive, send)

    def _is_cached(self, headers: Headers) -> bool:
        """Whether a request's headers show that the client has the file cached (status 304).

        If-None-Match takes precedence over If-Modified-Since.
        """
        if (tags := headers.get("if-none-match")) is not None:
            return "*" in tags.split() or self.headers["etag"] in _etags(tags)
        return _is_not_before(headers.get("if-modified-since", ""), self.headers["last-modified"])

    def _range_applies(self, headers: Headers) -> bool:
        """Whether the Range header applies: If-Range is missing or names this file version."""
        tag = headers.get("if-range")
        return tag is None or tag in (self.headers["etag"], self.headers["last-modified"])


def clip_name(job: Job) -> str:
    """Return the readable file name of a job's clip for downloads, such as `chelsea-seed7.mp4`."""
    if job.prompt:
        words = re.sub(r"[\W_]+", "-", job.prompt[:_NAME_CHARACTERS].lower()).strip("-")
    else:
        words = _stem(job)
    return f"{words or 'clip'}-seed{job.seed}.mp4"


def input_name(job: Job, path: Path) -> str:
    """Return the readable file name of a job's input file for downloads, such as `chelsea.png`.

    The image gets the client's name, such as `chelsea.png`. A further input file gets the name of
    its request field, such as `control_video.mp4`. The suffix is found from the first bytes of the
    file, because the stored file has none: it is named `ID.control_video`.

    Args:
        job: Job with the input file.
        path: Path of the stored file.
    """
    if path.name == job.input_file:
        return f"{_stem(job)}{path.suffix}"
    return path.suffix.removeprefix(".") + usual_suffix(read_signature(path))


def _stem(job: Job) -> str:
    return re.sub(r"\.\w+$", "", job.input_name) or "clip"


def content_disposition(name: str, kind: Literal["inline", "attachment"] = "inline") -> str:
    """Return a Content-Disposition header with a file name in ASCII and in UTF-8 (RFC 6266)."""
    plain = re.sub(r"[^A-Za-z0-9._ -]", "_", name)
    return f"{kind}; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"


def _etags(text: str) -> Iterable[str]:
    """Return the ETags that an If-None-Match header lists.

    The weak tag `W/"x"` counts as `"x"` (RFC 9110, 13.1.2).
    """
    return re.findall(r'"[^"]*"', text)


def _is_not_before(date: str, changed: str) -> bool:
    """Whether the HTTP date `date` is valid and not earlier than the HTTP date `changed`."""
    try:
        return parsedate_to_datetime(date) >= parsedate_to_datetime(changed)
    except (ValueError, TypeError):  # TypeError: one of the dates has no time zone
        return False


def _ranges(text: str, size: int) -> list[str] | None:
    """Return those ranges in a Range header that a file of `size` bytes can satisfy.

    Returns:
        Ranges such as `0-99`; empty: none can be satisfied. None if the unit is not bytes or the
        syntax is wrong, so that the whole file is sent.
    """
    unit, _, listed = text.partition("=")
    if unit.strip().lower() != "bytes":
        return None
    found, is_empty = [], True
    for part in filter(None, (each.strip(" \t") for each in listed.split(","))):
        is_empty = False
        match = _RANGE.fullmatch(part)
        if match is None or part == "-":
            return None
        first, last = match.groups()
        if first and last and int(last) < int(first):
            return None
        if int(first) < size if first else int(last) > 0:
            found.append(part)
    return None if is_empty else found
