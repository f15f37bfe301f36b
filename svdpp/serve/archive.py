"""Zip archive of clips, written while it is sent: memory does not grow with the clips' files."""

from __future__ import annotations

import io
import json
import time
import zipfile
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, BinaryIO

from fastapi.responses import StreamingResponse
from loguru import logger
from starlette.types import Send

from svdpp.errors import OutputError, redact
from svdpp.serve.auth import Owner
from svdpp.serve.files import clip_name
from svdpp.serve.job import JobState
from svdpp.serve.service import Service

#: Clips of one archive. The directory of the zip and the lines of `CLIPS_FILE` wait in memory.
MAX_CLIPS = 10_000
#: The member that says of each clip how it was made, one JSON object a line.
CLIPS_FILE = "clips.jsonl"

_READ_BYTES = 256 * 2**10
#: The first and last moment that a zip can name.
_EARLIEST, _LATEST = (1980, 1, 1, 0, 0, 0), (2107, 12, 31, 23, 59, 58)


@dataclass(frozen=True)
class Member:
    """File of an archive.

    Args:
        name: Name in the archive.
        changed_at: Unix seconds.
        content: Open file; who yields the member closes it.
        size: Size of the content in bytes.
    """

    name: str
    changed_at: float
    content: BinaryIO
    size: int


class Archive(StreamingResponse):
    """Response with a zip; if it cannot be finished, the connection ends before the zip does."""

    media_type = "application/zip"

    async def stream_response(self, send: Send) -> None:
        """Send the zip."""
        try:
            await super().stream_response(send)
        except OutputError as error:  # the head says 200 already
            logger.warning("an archive is not finished: {}", redact(error.message))


class _Output:
    """File that cannot seek, from which what was written is taken again and again."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Do nothing: `take` has all that was written."""

    def close(self) -> None:
        """Do nothing: there is no file."""

    def take(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data


def zip_members(members: Iterable[Member]) -> Generator[bytes, None, None]:
    """Yield the bytes of a zip, without compression: videos cannot be compressed.

    A member's content is read when its turn has come, and none is kept.
    """
    output = _Output()
    with zipfile.ZipFile(output, "w", zipfile.ZIP_STORED) as archive:
        for member in members:
            written_at = time.localtime(member.changed_at)[:6]
            info = zipfile.ZipInfo(member.name, min(max(written_at, _EARLIEST), _LATEST))
            info.external_attr = 0o644 << 16
            info.file_size = member.size  # so that a file of 4 GiB gets the larger header
            with archive.open(info, "w") as target:
                while data := member.content.read(_READ_BYTES):
                    target.write(data)
                    yield output.take()
    yield output.take()


def clip_members(service: Service, owner: Owner, ids: Iterable[str]) -> Iterator[Member]:
    """Yield the clips of an archive by readable names, and `CLIPS_FILE` as the last.

    A clip that its owner has removed meanwhile is left out. One whose file is missing has `file`
    null in `CLIPS_FILE`.

    Raises:
        OutputError: The queue or the store does not answer.
    """
    names = {CLIPS_FILE}
    lines = []
    for id in ids:
        job = service.queue.get(id)
        if job is None or job.owner != owner.name or job.state is not JobState.COMPLETED:
            continue
        path = job.clip_path(service.folder)
        service.queue.store.fetch(path)
        name = None
        try:
            file = path.open("rb")
        except FileNotFoundError:
            service.queue.store.check()  # a folder that is away would make every file missing
        else:
            name = _unique(clip_name(job), names)
            with file:
                size = path.stat().st_size
                yield Member(name, job.finished_at or 0.0, file, size)
        line: dict[str, Any] = {"file": name, **service.video(job).model_dump(mode="json")}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    text = "".join(lines).encode()
    yield Member(CLIPS_FILE, service.queue.now(), io.BytesIO(text), len(text))


def _unique(name: str, taken: set[str]) -> str:
    """Return a name that none of `taken` equals on a disk that ignores case, and add it to them."""
    path, number, found = PurePath(name), 1, name
    while found.casefold() in taken:
        number += 1
        found = f"{path.stem}-{number}{path.suffix}"
    taken.add(found.casefold())
    return found
