"""Hugging Face hub on this machine: HTTP server with the routes that huggingface_hub requests."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

#: Commit of the model org/tiny.
COMMIT = "0123456789abcdef0123456789abcdef01234567"
#: Access token of the hub. Tests check that no message contains it.
TOKEN = "hf_" + "x" * 34
_TINY = "org/tiny"


def commit_of(name: str) -> str:
    """Return the commit hash of a repository of the local hub, or of one of its revisions.

    Args:
        name: OWNER/NAME or OWNER/NAME@REVISION.
    """
    return COMMIT if name == _TINY else hashlib.sha1(name.encode()).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """HTTP handler of a stand-in for the Hugging Face hub; it records which files are requested."""

    error: ClassVar[tuple[int, str]] = (200, "")
    """HTTP status and error code of all responses."""
    errors: ClassVar[dict[str, tuple[int, str]]]
    """HTTP status and error code of all responses for a repository, by OWNER/NAME."""
    folder: ClassVar[Path]
    """Folder of the model org/tiny."""
    others: ClassVar[dict[str, Path]]
    """Folders of other repositories and revisions, by OWNER/NAME or OWNER/NAME@REVISION."""
    requested: ClassVar[list[str]]
    """Requested files: PATH for files of org/tiny, OWNER/NAME/PATH for files of other repositories.
    """
    url: ClassVar[str]

    def do_GET(self) -> None:
        found = re.match(_ROUTE, self.path)
        repository, kind, revision, file = found.groups() if found else (None, None, None, None)
        status, code = self.errors.get(repository or "", self.error)
        name = self._name(repository, revision)
        answer = self._answer(name, kind, file) if status == 200 else b""
        if answer is None:
            status, code, answer = 404, code or ("" if name else "RepoNotFound"), b""
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"denied for {TOKEN}")
        self.send_header("X-Repo-Commit", commit_of(name or ""))
        self.send_header("ETag", hashlib.sha256(answer).hexdigest())
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(answer)

    do_HEAD = do_GET

    def _name(self, repository: str | None, revision: str | None) -> str | None:
        """Return OWNER/NAME or OWNER/NAME@REVISION of a requested repository; None if unknown."""
        names = [_TINY, *self.others] if hasattr(self, "folder") else [*self.others]
        for name in names:
            own, _, tag = name.partition("@")
            if own == repository and revision in (tag or "main", commit_of(name), None):
                return name
        return None

    def _answer(self, name: str | None, kind: str | None, file: str | None) -> bytes | None:
        """Return the body of the local hub's response; None if the hub lacks the file."""
        if name is None:
            return None
        folder = self.folder if name == _TINY else self.others[name]
        if kind == "tree":
            files = [path for path in folder.rglob("*") if path.is_file()]
            names = {path.relative_to(folder).as_posix(): path for path in files}
            tree = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": name}
                for name, path in names.items()
            ]
            return json.dumps(tree).encode()
        repository = name.partition("@")[0]
        if kind in (None, "revision"):
            return json.dumps({"id": repository, "sha": commit_of(name)}).encode()
        if file is None or not (folder / file).is_file():
            return None
        self.requested.append(file if name == _TINY else f"{repository}/{file}")
        return (folder / file).read_bytes()

    def log_message(self, *args: object) -> None:
        """Print no line for each HTTP request."""


#: Path of a request. Its groups are the repository, the kind of request, the revision and the file.
_ROUTE = (
    r"/(?:api/models/)?([^/?]+/[^/?]+)(?:/(revision|tree|resolve)/([^/?]+)(?:/([^?]+))?)?"
    r"(?:\?.*)?$"
)


@contextmanager
def running_hub() -> Iterator[type[Hub]]:
    """Run a new local hub on a free port. Its class has the URL and the requested files."""
    handler = type("OneHub", (Hub,), {"requested": [], "others": {}, "errors": {}})
    server = HTTPServer(("127.0.0.1", 0), handler)
    handler.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
