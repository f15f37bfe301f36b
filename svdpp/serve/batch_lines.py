"""Lines of batch files, each a request for a clip: reads and checks them; returns their results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from svdpp.errors import SvdppError, describe_fault, error_from_dict
from svdpp.serve.auth import Owner
from svdpp.serve.job import Job, JobState
from svdpp.serve.middleware import MAX_JSON_BYTES
from svdpp.serve.request_schema import Capabilities, VideoRequest, parse_json
from svdpp.serve.schemas import ApiError, BatchLineResult, LineError, Video, to_api_error

#: Maximum number of lines of one batch.
MAX_LINES = 10_000
#: Maximum number of faults that a response lists. Further faults are only counted.
MAX_FAULTS = 1000
# Maximum number of characters of a `custom_id`.
_MAX_CUSTOM_ID = 512
# `take_lines` stops once the images in the taken lines have this many bytes, to limit memory.
_SLICE_BYTES = 32 * 2**20


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")

    custom_id: Annotated[str, Field(min_length=1, max_length=_MAX_CUSTOM_ID)]
    method: Literal["POST"]
    url: Literal["/v1/videos"]
    body: dict[str, Any]


@dataclass(frozen=True)
class CheckedLine:
    """Line of a batch with valid fields: its request, and the job for it, which is not stored yet.

    Args:
        number: Number of the line in the file, from 1.
        custom_id: Name of the line from the client.
        request: Request in the line, with its images and videos.
        job: Job for the request. It is not stored yet.
    """

    number: int
    custom_id: str
    request: VideoRequest
    job: Job


@dataclass
class LineFaults:
    """Collection of the faults of a batch's lines.

    Args:
        faults: The first `MAX_FAULTS` faults, as JSON objects; see `schemas.BatchFault`.
        total: Number of all faults.
        lines: Numbers of the lines with faults.
    """

    faults: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    lines: set[int] = field(default_factory=set)

    def add(self, line: int, custom_id: str | None, error: ApiError) -> None:
        """Add the faults of one line.

        Each entry of `error.details["faults"]` is a fault. Without such entries, `error` itself is
        the only fault.

        Args:
            line: Number of the line, from 1.
            custom_id: Id that the client gave the line; None: the line has no readable id.
            error: Error that the line caused.
        """
        each: Sequence[dict[str, Any]] = error.details.get("faults") or [{}]
        self.total += len(each)
        self.lines.add(line)
        for fault in each[: MAX_FAULTS - len(self.faults)]:
            name = fault.get("field", error.details.get("field"))
            # `error` has a single hint, even if it has several faults. A hint for several faults is
            # always about an unknown field, so only faults about unknown fields get the hint.
            has_hint = len(each) == 1 or "unknown" in fault["reason"]
            self.faults.append(
                {
                    "line": line,
                    "custom_id": custom_id,
                    "param": name,
                    "code": error.code,
                    "message": f"{name} {fault['reason']}" if fault else error.message,
                    "hint": error.hint if has_hint else "",
                }
            )


class BatchLineReader:
    """Reader of a batch's file, whose lines are requests. It also checks the requests' fields.

    Args:
        capabilities: Limits for the requests in lines.
        new_job: Function that checks the fields of a request, and returns a job. It gets the
            request, the owner, the text from which the seed is derived, and the SHA-256 of LoRAs
            by name.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        new_job: Callable[[VideoRequest, Owner, str | None, Mapping[str, str]], Job],
    ) -> None:
        self._capabilities = capabilities
        self._new_job = new_job

    def check_all(self, source: BinaryIO, owner: Owner) -> tuple[int, dict[str, str]]:
        """Check the fields of all lines of a batch; return the number of lines and their LoRAs.

        Returns:
            Number of lines, and the SHA-256 of each LoRA in the lines, by the LoRA's name.

        Raises:
            ApiError: Lines have faults (the error's details list them), or the file has no lines or
                too many lines.
        """
        faults, total, loras = LineFaults(), 0, dict[str, str]()
        for checked in self.read(source, owner, "", {}, faults):
            total += 1
            loras |= {lora.name: str(lora.sha256) for lora in checked.job.loras}
            del checked  # frees the memory of the line's images before the next line is read
        if faults.total:
            raise faulty_batch_error(faults)
        return total, loras

    def read(
        self,
        source: BinaryIO,
        owner: Owner,
        seed_key: str,
        loras: Mapping[str, str],
        faults: LineFaults,
    ) -> Iterator[CheckedLine]:
        """Yield each line of a batch with valid fields; add the faults of the others to `faults`.

        Args:
            source: Open file with the lines.
            owner: Owner of the lines.
            seed_key: Text that is the same for all lines. If a line gives no seed, its seed is
                derived from this text and the line's `custom_id`.
            loras: SHA-256 of LoRAs by name, as recorded when the batch was accepted. They take
                precedence over the LoRAs that the servers have now.
            faults: Collection of faults.

        Raises:
            ApiError: The file has no lines, or too many lines.
        """
        custom_ids: dict[str, int] = {}
        total = 0
        for number, text in _read_lines(source):
            total += 1
            if total > MAX_LINES:
                message = f"the batch has more than {MAX_LINES} lines"
                raise ApiError(422, "too_many_lines", message, "split the file", limit=MAX_LINES)
            custom_id = None
            try:
                line = _parse_line(text)
                custom_id = line.custom_id
                first = custom_ids.setdefault(custom_id, number)
                if first != number:
                    message = f"custom_id {custom_id[:60]!r} is already used in line {first}"
                    raise ApiError(
                        422, "repeated_custom_id", message, field="custom_id", first_line=first
                    )
                request = self._capabilities.validate(line.body)
                job = self._new_job(request, owner, f"{seed_key}\0{custom_id}", loras)
            except SvdppError as error:
                faults.add(number, custom_id or _custom_id_in(text), line_fault(error))
            else:
                yield CheckedLine(number, custom_id, request, job)
        if not total:
            hint = 'each line is {"custom_id", "method": "POST", "url": "/v1/videos", "body"}'
            raise ApiError(422, "empty_batch", "the batch has no lines", hint)


def take_lines(lines: Iterator[CheckedLine], most: int) -> list[CheckedLine]:
    """Take a batch's next lines: at most `most`, fewer if their images reach `_SLICE_BYTES`."""
    taken: list[CheckedLine] = []
    size = 0
    for line in islice(lines, most):
        taken.append(line)
        size += sum(file.size or 0 for file in line.request.files.values())
        if size >= _SLICE_BYTES:
            break
    return taken


def _read_lines(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each line of a batch's file, except empty lines.

    A line that is too long is truncated to `MAX_JSON_BYTES + 1` bytes, so that it does not fill the
    memory, and `_parse_line` still finds that it is too long.
    """
    source.seek(0)
    number = 0
    while text := source.readline(MAX_JSON_BYTES + 1):
        number += 1
        rest = text
        while len(rest) > MAX_JSON_BYTES and not rest.endswith(b"\n"):
            rest = source.readline(MAX_JSON_BYTES + 1)
        text = text.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else text.strip()
        if text:
            yield number, text


def _parse_line(text: bytes) -> _Line:
    """Parse a line of a batch's file. The request in its `body` is not checked.

    Raises:
        ApiError: The line is too long, is not a JSON object, or has unknown or missing keys.
    """
    if len(text) > MAX_JSON_BYTES:
        limit = MAX_JSON_BYTES
        message = f"the line is longer than {limit // 2**20} MiB"
        raise ApiError(
            422, "line_too_long", message, "make the image in the line smaller", limit_bytes=limit
        )
    try:
        values = parse_json(text)
        if not isinstance(values, dict):
            raise ValueError("the JSON value is not an object")
    except (ValueError, RecursionError) as error:
        reason = str(error)
        message = f"the line is not a JSON object: {reason}"
        raise ApiError(422, "invalid_json", message, reason=reason) from None
    try:
        return _Line.model_validate(values)
    except ValidationError as error:
        faults = [
            {"field": ".".join(map(str, each["loc"])), "reason": describe_fault(each)}
            for each in error.errors(include_url=False)
        ]
        message = "; ".join(f"{fault['field']} {fault['reason']}" for fault in faults)
        hint = 'each line is {"custom_id", "method": "POST", "url": "/v1/videos", "body"}'
        raise ApiError(422, "invalid_line", message, hint, faults=faults) from None


def _custom_id_in(text: bytes) -> str | None:
    """Return the `custom_id` of a batch's faulty line; None if it cannot be read."""
    with suppress(ValueError, RecursionError):
        values = json.loads(text)
        if isinstance(values, dict) and isinstance(values.get("custom_id"), str):
            return str(values["custom_id"])[:_MAX_CUSTOM_ID]
    return None


def line_fault(error: SvdppError) -> ApiError:
    """Convert an error that a batch's line caused to an `ApiError`; raise any other error again.

    Raises:
        SvdppError: `error` itself, if the server is the cause, and not the line.
    """
    fault = to_api_error(error)
    if fault.status >= 500:
        raise error
    return fault


def faulty_batch_error(faults: LineFaults) -> ApiError:
    """Return the error for a batch whose lines have faults."""
    first = [f"line {fault['line']}: {fault['message']}" for fault in faults.faults[:3]]
    number = len(faults.lines)
    text = f"{number} line{'s have' if number > 1 else ' has'} faults: {'; '.join(first)}"
    return ApiError(
        422,
        "invalid_batch",
        text,
        "details.faults lists them; nothing of the batch is stored",
        faults=faults.faults,
        num_faults=faults.total,
    )


def line_result(job: Job, video: Video) -> BatchLineResult:
    """Return a job's line in the output file or the error file of its batch.

    Args:
        job: Job that has ended.
        video: The API's representation of the job.
    """
    response: dict[str, Any] | None = {"status_code": 200, "request_id": job.id, "body": video}
    error = None
    if job.state is JobState.CANCELLED:
        response, error = None, LineError(code="batch_cancelled", message="the clip was cancelled")
    elif job.error is not None and video.error is not None:
        status = to_api_error(error_from_dict(job.error)).status
        response = {"status_code": status, "request_id": job.id, "body": video}
        error = LineError(code=video.error.code, message=video.error.message)
    id = f"batch_req_{job.id.removeprefix('video_')}"
    return BatchLineResult.model_validate(
        {"id": id, "custom_id": job.custom_id, "response": response, "error": error}
    )
