"""Owns the files of the page, listed once: no path of a client reaches the file system."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from starlette.responses import FileResponse

_FOLDER = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}


def _url_of(file: Path) -> str:
    return "/" if file.name == "index.html" else f"/page/{file.name}"


#: The files by the paths of their URLs.
PAGE_FILES: Mapping[str, Path] = MappingProxyType(
    {_url_of(file): file for file in _FOLDER.iterdir() if file.suffix in _TYPES}
)


def page_file(url_path: str) -> FileResponse:
    """The answer with a file of the page.

    Raises:
        KeyError: there is no such file.
    """
    file = PAGE_FILES[url_path]
    kind = f"{_TYPES[file.suffix]}; charset=utf-8"
    # Asked again each time, so that page and server are of one version.
    return FileResponse(file, media_type=kind, headers={"Cache-Control": "no-cache"})
