"""Zip archive of clips. It is created while it is sent, so the whole zip is never in memory."""

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

#: Maximum number of clips in an archive. It limits memory, because the zip's list of members
#: and the lines of `CLIPS_FILE` are kept in memory until the archive is complete.
MAX_CLIPS = 10_000
#: Name of the file in the archive with the metadata of each clip, one JSON object a line.
CLIPS_FILE = "clips.jsonl"

# Size in bytes of the pieces in which files are read.
_READ_BYTES = 256 * 2**10
#: Earliest and latest modification times that the zip format can store.
_EARLIEST, _LATEST = (1980, 1, 1, 0, 0, 0), (2107, 12, 31, 23, 59, 58)


@dataclass(frozen=True)
class ZipMember:
    """File that becomes a member of a zip archive.

    Args:
        name: Name of the file in the archive.
        changed_at: Time of the file's last change in unix seconds.
        content: Open file with the content. `clip_members`, which opened it, also closes it.
        size: Size of the content in bytes.
    """

    name: str
    changed_at: float
    content: BinaryIO
    size: int


class Archive(StreamingResponse):
    """HTTP response that sends a zip of clips while the zip is created.

    If an error occurs while the zip is sent, the connection is closed, so that the client notices
    that the zip is incomplete.
    """

    media_type = "application/zip"

    async def stream_response(self, send: Send) -> None:
        """Send the zip of clips to the client; if a clip cannot be read, log the error.

        The error cannot become an error response, because status 200 is already sent.
        """
        try:
            await super().stream_response(send)
        except OutputError as error:
            logger.warning("an archive could not be completed: {}", redact(error.message))


class _Output:
    """Write-only file object for `zipfile`, which keeps written bytes until `take` returns them.

    It cannot seek, so `zipfile` writes the zip in one pass.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Do nothing, because written bytes are already in memory, where `take` finds them."""

    def close(self) -> None:
        """Do nothing, because the zip's bytes are in memory, and no file is open."""

    def take(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data


def zip_members(members: Iterable[ZipMember]) -> Generator[bytes, None, None]:
    """Yield the bytes of an uncompressed zip of `members`, while their files are read.

    Members are read one after the other, in small pieces. The zip is uncompressed, because videos
    are compressed already.
    """
    output = _Output()
    with zipfile.ZipFile(output, "w", zipfile.ZIP_STORED) as archive:
        for member in members:
            written_at = time.localtime(member.changed_at)[:6]
            info = zipfile.ZipInfo(member.name, min(max(written_at, _EARLIEST), _LATEST))
            info.external_attr = 0o644 << 16
            # `zipfile` writes a member's header before its content, and needs the size to decide
            # between the zip and the zip64 format.
            info.file_size = member.size
            with archive.open(info, "w") as target:
                while data := member.content.read(_READ_BYTES):
                    target.write(data)
                    yield output.take()
    yield output.take()


def clip_members(service: Service, owner: Owner, ids: Iterable[str]) -> Iterator[ZipMember]:
    """Yield an owner's clips as zip members with readable names, and `CLIPS_FILE` as the last one.

    Jobs that do not exist, belong to another owner or are not completed are left out. If the file
    of a clip is missing, the clip's line in `CLIPS_FILE` has `file` null.

    Args:
        service: Service that made the clips.
        owner: Owner of the clips.
        ids: Ids of the clips' jobs.

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
            # If the disk is not mounted, `check` raises an error. Otherwise the clip's file was
            # removed, and the clip is only listed in `CLIPS_FILE`.
            service.queue.store.check()
        else:
            name = _unique_name(clip_name(job), names)
            with file:
                size = path.stat().st_size
                yield ZipMember(name, job.finished_at or 0.0, file, size)
        line: dict[str, Any] = {"file": name, **service.video(job).model_dump(mode="json")}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    text = "".join(lines).encode()
    yield ZipMember(CLIPS_FILE, service.queue.now(), io.BytesIO(text), len(text))


def _unique_name(name: str, taken: set[str]) -> str:
    """Return `name`, or a numbered name if `name` is in `taken`; add the result to `taken`.

    A second `clip.mp4`, for example, becomes `clip-2.mp4`. Names that differ only in case count as
    equal.
    """
    path, number, found = PurePath(name), 1, name
    while found.casefold() in taken:
        number += 1
        found = f"{path.stem}-{number}{path.suffix}"
    taken.add(found.casefold())
    return found
