"""Run of a jobs file at a server: sends jobs as batches, follows them, and downloads the clips.

`server.json` in the output folder lists the batches and their jobs. The file is written before a
batch is sent, and has the idempotency key by which the server detects a repeated request. So a
command that was interrupted at any moment can continue with the same batches.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from svdpp.client.connection import NotThereError, ServerConnection
from svdpp.client.server_model import ServerModel
from svdpp.config.limits import read_small_file
from svdpp.driver.job_lines import JobLineReader, raise_line_errors
from svdpp.driver.run_job import RunJob, job_key
from svdpp.errors import (
    InputError,
    RequestError,
    ServerError,
    SvdppError,
    error_to_dict,
    pluralize,
    recorded_path,
    without_folders,
)
from svdpp.media import output_files, video

#: Name of the JSON file in the output folder that lists the batches.
STATE_FILE = "server.json"
_SCHEMA_VERSION = 1
# Maximum size of `server.json` in bytes.
_MAX_BYTES = 2**28
# Maximum number of batches or videos in one page of a list from the server.
_PAGE = 100
_FIRST_POLL_SECONDS, _MAX_POLL_SECONDS = 0.5, 5.0
# Size in bytes of the pieces in which the body of a request is sent.
_PART_BYTES = 2**20
_FINAL = ("completed", "failed", "cancelled")


@dataclass
class BatchRecord:
    """Batch of a run at a server, recorded in `server.json` before the batch is sent."""

    key: str
    """Idempotency key of the request that creates the batch."""
    batch: str | None
    """Id of the batch; None until the server has responded."""
    clips: dict[str, str]
    """Hash of each clip's job (`ServerClip.key`), by the name of the clip. The name is also the
    `custom_id` of the clip's line in the batch."""


@dataclass
class ServerState:
    """Content of `server.json`: the server, its model, and the batches of a run."""

    server: str
    model: str
    parts: list[BatchRecord] = field(default_factory=list)
    """Batches of the run; `server.json` has them under the key `parts`."""

    def write(self, path: Path) -> None:
        """Write `server.json`, completely or not at all.

        Raises:
            OutputError: The file cannot be written.
        """
        output_files.write_json(path, {"schema_version": _SCHEMA_VERSION, **asdict(self)})


def read_state(path: Path) -> ServerState | None:
    """Return the state of an earlier run at a server, from `server.json`; None: no such file.

    Raises:
        InputError: The file cannot be read, or `svdpp run` did not write it.
    """
    if not path.exists():
        return None
    data = read_small_file(path, "state of a run at a server", _MAX_BYTES)
    try:
        values = json.loads(data)
        if values.pop("schema_version") != _SCHEMA_VERSION:
            raise ValueError("the file has another schema version")
        parts = [BatchRecord(**record) for record in values.pop("parts")]
        return ServerState(**values, parts=parts)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        text = f"{str(path)!r} is not the state of a run at a server"
        hint = "`overwrite` makes all clips again"
        raise InputError(text, hint, details={"path": str(path)}) from error


@dataclass(frozen=True, kw_only=True)
class ServerClip:
    """Clip that a server has to make for a run."""

    name: str
    job: RunJob
    key: str
    """Hash of the job's inputs and parameters; see `job_key`."""

    @property
    def output(self) -> str:
        """Name of the clip's mp4 in the output folder."""
        return f"{self.name}.mp4"


@dataclass(frozen=True, kw_only=True)
class Watchers:
    """Callbacks that get the progress and the results of the clips that a server makes."""

    on_started: Callable[[], None]
    """Function that is called, perhaps repeatedly, after the server has begun a clip."""
    on_eta: Callable[[float | None], None]
    """Function that gets the seconds until the last clip of a batch is finished; None: unknown."""
    on_done: Callable[[ServerClip, dict[str, Any]], None]
    """Function that gets a finished clip and the clip's JSON."""
    on_failed: Callable[[ServerClip, dict[str, Any]], None]
    """Function that gets a failed or cancelled clip, and its error as a JSON object."""


class BatchRun:
    """Run whose clips a server makes: sends batches of jobs, and downloads finished clips.

    Args:
        connection: Connection to the server.
        model: Model of the server.
        reader: Reader of the jobs file. It helps to turn errors of the server into errors that name
            the line and the field of the file.
        folder: Output folder of the clips.
        clips: Clips to make.
        say: Function that prints a message for the user.
    """

    def __init__(
        self,
        connection: ServerConnection,
        model: ServerModel,
        reader: JobLineReader,
        folder: Path,
        clips: Sequence[ServerClip],
        say: Callable[[str], None],
    ) -> None:
        self._connection, self._model, self._reader = connection, model, reader
        self._folder, self._say = folder, say
        self._pending = {clip.name: clip for clip in clips}
        self._state = ServerState(connection.url, model.name)
        # For each batch, the id of a video: this video and all earlier videos of the batch have
        # ended, so the next query starts after it. If the id is None or missing, the query starts
        # at the first video.
        self._cursors: dict[str, str | None] = {}

    @property
    def batch_ids(self) -> list[str]:
        """Ids of the batches that the server has accepted."""
        return [record.batch for record in self._state.parts if record.batch is not None]

    @property
    def _state_path(self) -> Path:
        return self._folder / STATE_FILE

    def adopt(self, earlier: ServerState) -> None:
        """Continue with the batches of an earlier run, so that their clips are not sent again.

        Args:
            earlier: State of the earlier run.

        Raises:
            RequestError: The earlier run used another server, or the server had another model.
            SvdppError: The server rejects a request, or did not respond for too long.
        """
        for name in ("server", "model"):
            before, now = getattr(earlier, name), getattr(self._state, name)
            if before != now:
                raise RequestError(
                    f"the batches of this folder are for {name} {before!r}, not {now!r}",
                    f"use the same {name}, or use another `out` folder; `overwrite` makes all "
                    "clips again",
                    details={"before": before, "now": now},
                )
        for record in earlier.parts:
            record.clips = {
                name: key
                for name, key in record.clips.items()
                if name in self._pending and self._pending[name].key == key
            }
            if record.clips and self._refresh(record):
                self._state.parts.append(record)
                self._say(f"going on with {record.batch}")

    def _refresh(self, record: BatchRecord) -> bool:
        """Query a batch of an earlier run, and remove clips from `record` that must be sent again.

        Returns:
            Whether the batch still has clips to wait for or download. False if the server does not
            have the batch, has rejected it, or if all of its clips must be sent again.
        """
        if record.batch is None:  # the batch was sent, but the response with its id was lost
            page = self._connection.get("/v1/batches", limit=_PAGE)
            found = [
                each for each in page["data"] if (each["metadata"] or {}).get("run") == record.key
            ]
            record.batch = found[0]["id"] if found else None
        try:
            batch = None if record.batch is None else self._batch(record.batch)
        except NotThereError:
            batch = None
        if batch is None or batch["status"] == "failed":
            return False
        # Jobs that ended without a clip are sent again in a new batch.
        stem = f"/v1/files/file_{batch['id'].removeprefix('batch_')}"
        gone = set(self._custom_ids(f"{stem}_error/content"))
        if batch["status"] in _FINAL:
            gone |= record.clips.keys() - set(self._custom_ids(f"{stem}_output/content"))
        record.clips = {name: key for name, key in record.clips.items() if name not in gone}
        return bool(record.clips)

    def _batch(self, id: str) -> dict[str, Any]:
        return self._connection.get(f"/v1/batches/{id}")

    def _custom_ids(self, path: str) -> Iterator[str]:
        for line in self._connection.lines(path):
            yield str(json.loads(line)["custom_id"])

    # --- requests that send batches ---------------------------------------------------------------

    def submit(self) -> None:
        """Send the clips that are in no batch yet, in as few batches as the server accepts.

        Raises:
            RequestError: The server rejects lines.
            SvdppError: The server rejects a request, or did not respond for too long.
            OutputError: `server.json` cannot be written.
        """
        known = {name for record in self._state.parts for name in record.clips}
        left = [clip for name, clip in self._pending.items() if name not in known]
        self._state.write(self._state_path)
        while left:
            with tempfile.TemporaryFile(prefix="svdpp-batch-") as file:
                taken = self._write_lines(left, file)
                clips, left = left[:taken], left[taken:]
                record = BatchRecord(
                    secrets.token_hex(16), None, {clip.name: clip.key for clip in clips}
                )
                self._state.parts.append(record)
                self._state.write(self._state_path)
                self._send(record, clips, file)
                self._state.write(self._state_path)

    def _write_lines(self, clips: Sequence[ServerClip], file: IO[bytes]) -> int:
        """Write a line for each clip, up to the limits of a batch; return the number of lines."""
        size = 0
        for index, clip in enumerate(clips):
            line = {
                "custom_id": clip.name,
                "method": "POST",
                "url": "/v1/videos",
                "body": self._model.body(clip.job),
            }
            text = json.dumps(line).encode() + b"\n"
            is_full = index == self._model.max_batch_lines
            # The request's body is a form that contains the lines. 64 KiB are left for its other
            # parts.
            if is_full or (index and size + len(text) > self._model.max_batch_bytes - 2**16):
                return index
            file.write(text)
            size += len(text)
        return len(clips)

    def _send(self, record: BatchRecord, clips: Sequence[ServerClip], file: IO[bytes]) -> None:
        """Send a batch of lines to the server, and record the id that the server gives it."""
        boundary = f"svdpp-{record.key}"
        metadata = json.dumps({"run": record.key})
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="metadata"\r\n\r\n{metadata}\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; '
            'filename="jobs.jsonl"\r\nContent-Type: application/jsonl\r\n\r\n'
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()

        def content() -> Iterator[bytes]:
            file.seek(0)
            yield head
            while piece := file.read(_PART_BYTES):
                yield piece
            yield tail

        num_bytes = file.seek(0, 2) + len(head) + len(tail)
        headers = {
            "Content-Type": f"multipart/form-data; boundary={boundary}",
            "Content-Length": str(num_bytes),
            "Idempotency-Key": record.key,
        }
        try:
            batch = self._connection.post("/v1/batches", content, headers)
        except RequestError as error:
            self._state.parts.remove(record)
            self._state.write(self._state_path)
            if faults := error.details.get("faults"):
                self._raise_faults(faults, clips)
            raise
        record.batch = batch["id"]
        self._say(f"sent {pluralize(len(clips), 'clip')} as {batch['id']}")

    def _raise_faults(
        self, faults: Sequence[Mapping[str, Any]], clips: Sequence[ServerClip]
    ) -> None:
        """Raise the faults that the server found in a batch, as errors about the jobs file."""
        lines = {clip.name: clip.job.line or 0 for clip in clips}
        errors: list[SvdppError] = []
        for fault in faults:
            name, message = fault.get("param"), str(fault["message"])
            field = self._reader.image_field if name == "input_reference" else name
            line, hint = lines.get(str(fault.get("custom_id")), 0), str(fault.get("hint") or "")
            text = f"the server says: {message.removeprefix(f'{name} ')}"
            errors.append(self._reader.file.error(line, text, hint, field))
        wrong = {error.details["line"] for error in errors}
        raise_line_errors(errors, self._reader.file, len(clips) - len(wrong))

    # --- progress and download of clips -----------------------------------------------------------

    def follow(self, watchers: Watchers) -> None:
        """Download each clip once it is finished, until all clips have ended.

        Args:
            watchers: Callbacks for the progress and the outcomes of clips.

        Raises:
            RequestError: The server has rejected lines of a batch, for example their images.
            SvdppError: The server rejects a request, or did not respond for too long.
            OutputError: A clip cannot be written.
        """
        wait = _FIRST_POLL_SECONDS
        while True:
            has_changed = False
            for record in self._state.parts:
                if any(name in self._pending for name in record.clips):
                    has_changed |= self._follow_batch(record, watchers)
            if not self._pending:
                return
            wait = _FIRST_POLL_SECONDS if has_changed else min(2 * wait, _MAX_POLL_SECONDS)
            time.sleep(wait)

    def _follow_batch(self, record: BatchRecord, watchers: Watchers) -> bool:
        """Query one batch at the server, and download clips finished since the last query.

        Returns:
            Whether a clip has finished, failed or been cancelled since the last query.
        """
        assert record.batch is not None
        # The batch is queried before its videos. In the other order, the last clip could finish
        # between the two queries. The videos would then show it as unfinished, but the batch as
        # ended, and the clip would be reported as removed from the server.
        batch = self._batch(record.batch)
        if batch["status"] == "failed":
            clips = [self._pending[name] for name in record.clips if name in self._pending]
            self._state.parts.remove(record)
            self._state.write(self._state_path)
            self._raise_faults(batch["errors"]["data"], clips)
        before = len(self._pending)
        for video_view in self._videos(record.batch):
            self._handle_video(record, video_view, watchers)
        if batch["status"] in _FINAL:
            for name in record.clips.keys() & self._pending.keys():
                text = f"the server has no clip {name!r} any more: it was removed there"
                error = ServerError(
                    text,
                    "run the command again with `resume` to request the clip again",
                    details={"clip": name},
                )
                watchers.on_failed(self._pending.pop(name), error_to_dict(error))
        elif batch["status"] == "in_progress":
            (last,) = self._page(record.batch, None, limit=1, order="desc")["data"] or [{}]
            watchers.on_eta(last.get("eta_seconds"))
        return len(self._pending) < before

    def _page(self, batch: str, after: str | None, limit: int, order: str) -> dict[str, Any]:
        return self._connection.get(
            "/v1/videos", batch_id=batch, after=after, limit=limit, order=order
        )

    def _videos(self, batch: str) -> Iterator[dict[str, Any]]:
        """Yield the videos of a batch, from the first video that had not ended at the last query.

        After a page with only queued videos, no further page is requested: the videos after them
        are probably queued, too.
        """
        after = self._cursors.get(batch)
        is_first = True
        while True:
            try:
                page = self._page(batch, after, _PAGE, "asc")
            except NotThereError:
                if after is None:  # the server has removed the batch
                    return
                # The video at the cursor was removed, so reading starts again at the first video.
                after = self._cursors[batch] = None
                continue
            for each in page["data"]:
                yield each
                is_first &= each["status"] in _FINAL
                if is_first:
                    self._cursors[batch] = each["id"]
            waits = all(each["status"] == "queued" for each in page["data"])
            if waits or not page["has_more"]:
                return
            after = page["last_id"]

    def _handle_video(
        self, record: BatchRecord, view: Mapping[str, Any], watchers: Watchers
    ) -> None:
        """Handle a video of a batch: if it has ended, download its clip or report its error."""
        name = str(view["custom_id"])
        if view["status"] != "queued":
            watchers.on_started()
        if name not in record.clips or name not in self._pending:
            return
        clip = self._pending[name]
        if view["status"] == "completed":
            metadata = self._download(clip, str(view["id"]))
            del self._pending[name]
            watchers.on_done(clip, metadata)
        elif view["status"] in _FINAL:
            del self._pending[name]
            watchers.on_failed(clip, error_to_dict(_lost_error(view)))

    def _download(self, clip: ServerClip, id: str) -> dict[str, Any]:
        """Download a clip and its JSON from the server into the output folder; return the JSON."""
        metadata = self._connection.get(f"/v1/videos/{id}/metadata")
        path = self._folder / clip.output
        made_from = clip.job.made_from
        for name, file in (("input", made_from.media_file), ("last_image", made_from.last_image)):
            if file is not None and name in metadata:
                metadata[name] = recorded_path(file.path, self._folder)
        if made_from.references:
            paths = [recorded_path(file.path, self._folder) for file in made_from.references]
            metadata["references"] = paths
        for name, file in made_from.videos:
            metadata["videos"][name] = recorded_path(file.path, self._folder)
        metadata["output"] = clip.output
        with tempfile.TemporaryFile(prefix="svdpp-clip-") as content:

            def write(parts: Iterator[bytes]) -> None:
                content.seek(0)
                content.truncate()
                for part in parts:
                    content.write(part)

            self._connection.download(f"/v1/videos/{id}/content", write)
            content.seek(0)
            if hashlib.file_digest(content, "sha256").hexdigest() != metadata["file_sha256"]:
                raise ServerError(
                    f"{clip.output!r} was downloaded with another SHA-256 than the server lists",
                    "a proxy may have changed the file; run the command again with `resume`",
                    details={"clip": clip.output},
                )
            content.seek(0)
            with (
                output_files.atomic_output(str(path), path.suffix) as temporary,
                temporary.open("wb") as target,
            ):
                shutil.copyfileobj(content, target)
        output_files.write_json(self._folder / f"{clip.output}.json", metadata)
        return metadata


def _lost_error(view: Mapping[str, Any]) -> ServerError:
    if view["status"] == "cancelled":
        return ServerError(
            "the clip was cancelled at the server",
            "run the command again with `resume` to request the clip again",
        )
    error = view["error"] or {}
    message = without_folders(str(error.get("message", "the clip failed at the server")))
    return ServerError(
        message,
        "run the command again with `resume` to request the clip again",
        details={"video": view["id"]},
    )


def is_intact(folder: Path, clip: ServerClip, done: Mapping[str, str]) -> bool:
    """Whether the output folder already has a clip, made from the same job, in an unchanged file.

    Args:
        folder: Folder of the clips.
        clip: Clip of the run.
        done: Hash of the job (`ServerClip.key`) of each finished clip, by the name of the clip's
            file.
    """
    path = folder / clip.output
    if done.get(clip.output) != clip.key:
        return False
    try:
        metadata = json.loads((folder / f"{clip.output}.json").read_text())
        return bool(video.clip_sha256(path) == metadata["file_sha256"])
    except (OSError, ValueError, KeyError, TypeError, InputError):
        return False


def server_clips(jobs: Sequence[RunJob]) -> list[ServerClip]:
    """Return a `ServerClip` for each job of a run at a server.

    Args:
        jobs: Jobs with names. A clip gets the name of its job.
    """
    return [ServerClip(name=job.name, job=job, key=job_key(job)) for job in jobs]
