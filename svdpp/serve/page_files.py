"""The files of the page, listed once: no path of a client reaches the file system; and 304."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import NotModifiedResponse, StaticFiles

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


#: The files by the paths of their URLs.
PAGE_FILES: Mapping[str, Path] = MappingProxyType(
    {
        "/" if file.name == "index.html" else f"/page/{file.name}": file
        for file in (Path(__file__).parent / "page").iterdir()
        if file.suffix in _TYPES
    }
)


def page_file(request: Request) -> Response:
    """The answer with a file of the page.

    Raises:
        KeyError: there is no such file.
    """
    file = PAGE_FILES[request.scope["path"]]
    kind = f"{_TYPES[file.suffix]}; charset=utf-8"
    # Asked again each time, so that page and server are of one version.
    headers = {"Cache-Control": "no-cache"}
    answer = FileResponse(file, media_type=kind, headers=headers, stat_result=file.stat())
    return unless_known(answer, request)


def unless_known(answer: FileResponse, request: Request) -> Response:
    """`answer`, or 304 if the client says that it has the file. `answer` needs a `stat_result`."""
    if StaticFiles().is_not_modified(answer.headers, request.headers):
        return NotModifiedResponse(answer.headers)
    return answer
