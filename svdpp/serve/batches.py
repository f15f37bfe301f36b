"""Batches of requests: the lines of an uploaded file become jobs, once all lines are checked.

The fields of all lines are checked before a batch is accepted, so the client gets the faults of all
lines at once. Decoding thousands of images takes minutes. So a thread decodes the images later,
while the state of the batch is `validating`, and then stores the jobs, some lines at a time. The
batch's row has the number of lines that are jobs. So the thread can continue after a restart, or
another server of a fleet can.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from loguru import logger
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from svdpp.errors import OutputError, SvdppError, describe_fault, error_from_dict
from svdpp.serve.auth import Owner
from svdpp.serve.batch_table import Batch, BatchFile, BatchState, BatchTable, check_same_batch
from svdpp.serve.clock import ClockError, SteadyClock, uptime
from svdpp.serve.job import Job, JobState
from svdpp.serve.middleware import MAX_JSON_BYTES
from svdpp.serve.periodic_thread import PeriodicThread
from svdpp.serve.queue import JobQueue, QueueFullError
from svdpp.serve.request_schema import Capabilities, VideoRequest, parse_json
from svdpp.serve.retention import ORPHAN_SCAN_SECONDS
from svdpp.serve.schemas import ApiError, BatchLineResult, LineError, Video, to_api_error
from svdpp.serve.sqlite import BackendUnavailableError
from svdpp.serve.uploads import MAX_DECODERS, DecodedImages, UploadStore, sanitize_filename

#: Maximum number of lines of one batch.
MAX_LINES = 10_000
#: Maximum total number of lines of all batches whose jobs have not ended.
MAX_OPEN_LINES = 20_000
#: Maximum bytes of all files that one API key stores at the same time.
MAX_FILE_BYTES_PER_KEY = 2**30
#: Seconds after which failed batches are removed, and files that no batch reads.
RETENTION_SECONDS = 86400
#: Maximum number of faults that a response lists. Further faults are only counted.
MAX_FAULTS = 1000

#: Route of the API to which each line of a batch is a request.
ENDPOINT = "/v1/videos"
_MAX_CUSTOM_ID = 512
# Seconds between two searches for batches that another server accepted, and between two cleanups.
_LOOK_SECONDS, _TIDY_SECONDS = 10.0, 60.0
# Number of lines whose images are decoded, or that become jobs, before another batch continues.
_DECODED_LINES, _STORED_LINES = 16, 100
# Maximum bytes of images in memory at the same time; the last image may exceed the limit.
_SLICE_BYTES = 32 * 2**20


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")

    custom_id: Annotated[str, Field(min_length=1, max_length=_MAX_CUSTOM_ID)]
    method: Literal["POST"]
    url: Literal["/v1/videos"]
    body: dict[str, Any]


@dataclass(frozen=True)
class _CheckedLine:
    """Line of a batch whose fields are valid, with the request (and its images) and the new job.

    `job` is not stored yet.
    """

    number: int
    custom_id: str
    request: VideoRequest
    job: Job


@dataclass
class _Faults:
    """Collection of the faults of a batch's lines.

    All faults are counted; the first ones are kept.
    """

    faults: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    lines: set[int] = field(default_factory=set)

    def add(self, line: int, custom_id: str | None, error: ApiError) -> None:
        """Add the faults of one line: one fault for each field that an error names."""
        each: Sequence[dict[str, Any]] = error.details.get("faults") or [{}]
        self.total += len(each)
        self.lines.add(line)
        for fault in each[: MAX_FAULTS - len(self.faults)]:
            name = fault.get("field", error.details.get("field"))
            # If an error names several fields, its hint is kept only for the unknown field, because
            # it is about that field.
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


class Batches:
    """Operations on the batches of a server. Any thread may call any method."""

    def __init__(
        self,
        queue: JobQueue,
        capabilities: Capabilities,
        *,
        uploads: UploadStore,
        keep_seconds: float | None,
        check_accepts_jobs: Callable[[], None],
        new_job: Callable[[VideoRequest, Owner, str | None, Mapping[str, str]], Job],
        check_uploads: Callable[[VideoRequest, Job, DecodedImages], None],
        save_uploads: Callable[[VideoRequest, Job, ExitStack, DecodedImages], dict[str, Any]],
        cancel_job: Callable[[str], bool],
        on_stored: Callable[[], None],
        on_cancelled: Callable[[int], None],
    ) -> None:
        """Take the queue, and the functions with which the service handles a request for one clip.

        Args:
            queue: Queue of the jobs.
            capabilities: Limits for the requests in lines.
            uploads: Store of images and of the files of lines.
            keep_seconds: Age in seconds at which clips are removed; None: clips are kept.
            check_accepts_jobs: Function that raises if the server accepts no jobs now.
            new_job: Function that checks the fields of a request, and returns the job. It also gets
                the text from which the seed is derived, and the hashes of LoRAs by name.
            check_uploads: Function that checks that the images and videos of a request can be
                decoded.
            save_uploads: Function that stores the images and videos of a request, and returns the
                job's fields with the names of the stored files.
            cancel_job: Function that cancels a job in progress.
            on_stored: Function that is called after lines have become jobs.
            on_cancelled: Function that gets the number of waiting jobs that were cancelled.
        """
        self.table = BatchTable(queue)
        """Table with the rows of the batches."""
        self._queue = queue
        self._capabilities = capabilities
        self._uploads = uploads
        self.keep_seconds = min(keep_seconds or RETENTION_SECONDS, RETENTION_SECONDS)
        """Age in seconds at which an uploaded file of lines is removed if no batch reads it."""
        self._check_accepts_jobs = check_accepts_jobs
        self._new_job = new_job
        self._check_uploads = check_uploads
        self._save_uploads = save_uploads
        self._cancel_job = cancel_job
        self._on_stored = on_stored
        self._on_cancelled = on_cancelled
        self._clock = SteadyClock()
        self._tidy_at = 0.0
        # Results of decoding the images of each batch. If the disk fails, the results are kept, so
        # that the images need not be decoded again.
        self._decoded: dict[str, DecodedImages] = {}
        self.thread = PeriodicThread(
            "batches", self._run_once, _LOOK_SECONDS, error_message="a batch waits"
        )
        """Thread that turns the lines of accepted batches into jobs."""

    # --- files with the lines of batches ----------------------------------------------------------

    def add_file(self, source: BinaryIO, name: str, owner: Owner) -> BatchFile:
        """Store a file of lines durably.

        Raises:
            ApiError: The files of this key have too many bytes, or the server accepts no files now.
            OutputError: The file cannot be stored.
        """
        self._check_accepts_jobs()
        id = f"file_{secrets.token_hex(16)}"
        sha256, size = self._uploads.save_lines(source, id)
        file = BatchFile(
            id=id,
            owner=owner.name,
            name=sanitize_filename(name),
            bytes=size,
            sha256=sha256,
            created_at=self._queue.now(),
        )
        path = file.path(self._queue.store.folder)
        try:
            self._queue.store.put(path)
            self.table.add_file(file, MAX_FILE_BYTES_PER_KEY)
        except BackendUnavailableError:
            raise  # the stored content is kept, because the database may have stored the file's row
        except QueueFullError as error:
            self._queue.store.discard(path)
            limit = MAX_FILE_BYTES_PER_KEY
            text = f"the files of this key would have more than {limit // 2**20} MiB"
            hint = "remove some, by DELETE /v1/files/{id}, or wait until their batches have begun"
            raise ApiError(429, "too_many_files", text, hint, retry=60, **error.details) from error
        except BaseException:
            self._queue.store.discard(path)
            raise
        return file

    def file(self, id: str, owner: Owner) -> BatchFile:
        """Return a file of an owner by the file's id.

        Raises:
            ApiError: The owner has no such file.
        """
        file = self.table.file(id)
        if file is None or file.owner != owner.name:
            hint = ""
            batch = self.table.find_by_file(id)
            if batch is not None and batch.owner == owner.name:
                hint = f"the lines of {batch.id} were in it; it went when they became videos"
            raise ApiError(404, "file_not_found", f"there is no file {id[:60]!r}", hint)
        return file

    def content(self, file: BatchFile) -> Path:
        """Return the path of the content of a file.

        Raises:
            ApiError: The content has been removed.
        """
        path = file.path(self._queue.store.folder)
        self._queue.store.fetch(path)
        if not path.is_file():
            self._queue.store.check()
            raise ApiError(404, "file_not_found", f"there is no file {file.id!r}")
        return path

    def remove_file(self, id: str, owner: Owner) -> None:
        """Remove a file that no batch needs.

        Raises:
            ApiError: The owner has no such file, or a batch with this file is still `validating`.
        """
        file = self.file(id, owner)
        batch = self.table.find_by_file(id)
        if batch is not None and batch.state is BatchState.VALIDATING and not batch.cancelled_at:
            text = f"{batch.id} still reads {id}"
            raise ApiError(409, "file_in_use", text, "cancel the batch first", id=batch.id)
        self._remove_file(file)

    def _remove_file(self, file: BatchFile) -> None:
        """Remove a file's content, then its row.

        If the server dies in between, the row remains, and the file is removed again later.
        """
        self._queue.store.remove(file.path(self._queue.store.folder))
        self.table.remove_file(file.id)

    # --- requests that create or change batches ---------------------------------------------------

    def create(
        self,
        owner: Owner,
        idempotency_key: str | None,
        *,
        input_file_id: str | None = None,
        source: BinaryIO | None = None,
        name: str = "",
        completion_window: str = "24h",
        metadata: dict[str, str] | None = None,
    ) -> Batch:
        """Check the fields of all lines and store the batch durably; return the batch.

        If an earlier request had the same idempotency key, the batch of that request is returned.

        Args:
            owner: Owner of the batch.
            idempotency_key: Key that a client repeats with a repeated request; None: no key.
            input_file_id: Id of the stored file with the lines; None: `source` has the lines.
            source: Open file with the lines; None: `input_file_id` names a stored file.
            name: File name of `source` from the client.
            completion_window: Time limit from the client, which has no effect.
            metadata: Texts by name that the client wants to store with the batch.

        Raises:
            ApiError: A line has a fault, a limit is reached, or the file does not exist.
            RequestError: The idempotency key was used for another batch.
            OutputError: The batch cannot be stored.
        """
        self._check_accepts_jobs()
        known = (
            self.table.find(owner.name, idempotency_key=idempotency_key)
            if idempotency_key is not None
            else None
        )
        if known is not None and known.input_file == input_file_id:
            return known  # the input file of the earlier request may no longer exist
        file = None if input_file_id is None else self.file(input_file_id, owner)
        with ExitStack() as opened:
            if file is not None:
                source = opened.enter_context(self.content(file).open("rb"))
            assert source is not None
            total, loras = self._check_fields(source, owner)
            is_own = file is None
            if file is None:
                file = self.add_file(source, name, owner)
        batch = Batch(
            id=f"batch_{secrets.token_hex(16)}",
            owner=owner.name,
            model_key=self._capabilities.model_key,
            created_at=self._queue.now(),
            input_file=file.id,
            input_sha256=file.sha256,
            total=total,
            completion_window=completion_window,
            metadata=metadata or {},
            loras=loras,
            idempotency_key=idempotency_key,
        )
        stored = batch
        try:
            if known is not None:
                stored = check_same_batch(known, batch)
            else:
                stored = self.table.add(batch, MAX_OPEN_LINES, owner.max_open)
        except QueueFullError as error:
            raise _full_error(error.details) from error
        finally:
            if is_own and not self._is_stored(batch):
                with suppress(OutputError):
                    self._remove_file(file)
        if stored.id == batch.id:
            logger.info("{} is requested, with {} lines", batch.id, total)
            self.thread.wake()
        return stored

    def _is_stored(self, batch: Batch) -> bool:
        """Whether the queue has stored the batch; True if the queue does not answer."""
        try:
            return self.table.get(batch.id) is not None
        except OutputError:
            return True

    def get(self, id: str, owner: Owner) -> Batch:
        """Return a batch of an owner. A batch of another owner looks like a missing one.

        Raises:
            ApiError: The owner has no such batch.
        """
        batch = self.table.get(id)
        if batch is None or batch.owner != owner.name:
            raise ApiError(404, "batch_not_found", f"there is no batch {id[:60]!r}")
        return batch

    def cancel(self, id: str, owner: Owner) -> Batch:
        """Cancel the unfinished clips of a batch. A batch that has ended does not change.

        Raises:
            ApiError: The owner has no such batch.
            OutputError: The queue cannot be changed.
        """
        batch = self.get(id, owner)
        if self.table.request_cancel(id):
            logger.info("{} is cancelled", id)
        if self.get(id, owner).cancelled_at is not None:
            self._cancel_jobs(id)
        return self.table.get(id) or batch

    def _cancel_jobs(self, id: str) -> None:
        while cancelled := self.table.cancel_waiting(id):
            self._on_cancelled(len(cancelled))
        for job_id in self.table.running(id):
            self._cancel_job(job_id)

    # --- results of batches -----------------------------------------------------------------------

    def results(self, batch: Batch, *, errors: bool, view: Callable[[Job], Video]) -> Iterator[str]:
        """Yield the lines that a batch's output file, or its error file, has so far.

        Args:
            batch: Batch.
            errors: Whether to yield the error file, with the jobs that ended without a clip.
            view: Function that returns the API's representation of a job.

        Raises:
            OutputError: The queue cannot be read.
        """
        states = (JobState.FAILED, JobState.CANCELLED) if errors else (JobState.COMPLETED,)
        for job in self.table.jobs(batch.id, states):
            yield _result_of(job, view(job)).model_dump_json() + "\n"

    # --- checks of the lines ----------------------------------------------------------------------

    def _check_fields(self, source: BinaryIO, owner: Owner) -> tuple[int, dict[str, str]]:
        """Check the fields of all lines of a file, without the images.

        Returns:
            Number of lines, and the SHA-256 of each LoRA that they name, by name.

        Raises:
            ApiError: A line has a fault; the details name the faults of all lines.
        """
        faults, total, loras = _Faults(), 0, dict[str, str]()
        for checked in self._lines(source, owner, "", {}, faults):
            total += 1
            loras |= {lora.name: str(lora.sha256) for lora in checked.job.loras}
            del checked  # frees the memory of the line's images before the next line is read
        if faults.total:
            raise _faulty_error(faults)
        return total, loras

    def _lines(
        self,
        source: BinaryIO,
        owner: Owner,
        seed_key: str,
        loras: Mapping[str, str],
        faults: _Faults,
    ) -> Iterator[_CheckedLine]:
        """Yield the lines of a file that have valid fields; add faults of other lines to `faults`.

        Args:
            source: Open file with the lines.
            owner: Owner of the lines.
            seed_key: Text from which seeds are derived, with the line's `custom_id`.
            loras: SHA-256 of LoRAs by name, which replace those of the servers that run now.
            faults: Collection of faults.

        Raises:
            ApiError: The file has no lines, or too many lines.
        """
        custom_ids: dict[str, int] = {}
        total = 0
        for number, text in _read_lines(source):
            total += 1
            if total > MAX_LINES:
                text_ = f"the batch has more than {MAX_LINES} lines"
                raise ApiError(422, "too_many_lines", text_, "split the file", limit=MAX_LINES)
            custom_id = None
            try:
                line = _parse_line(text)
                custom_id = line.custom_id
                if (first := custom_ids.setdefault(custom_id, number)) != number:
                    text_ = f"custom_id {custom_id[:60]!r} is that of line {first} already"
                    raise ApiError(
                        422, "repeated_custom_id", text_, field="custom_id", first_line=first
                    )
                request = self._capabilities.validate(line.body)
                job = self._new_job(request, owner, f"{seed_key}\0{custom_id}", loras)
            except SvdppError as error:
                faults.add(number, custom_id or _custom_id_in(text), _fault_of(error))
            else:
                yield _CheckedLine(number, custom_id, request, job)
        if not total:
            hint = 'each line is {"custom_id", "method": "POST", "url": "/v1/videos", "body"}'
            raise ApiError(422, "empty_batch", "the batch has no lines", hint)

    # --- methods for the thread that turns lines into jobs ----------------------------------------

    def _run_once(self) -> None:
        """Work on all accepted batches in turns, so that a long batch does not delay the others."""
        if uptime() >= self._tidy_at:
            self._tidy()
            self._tidy_at = uptime() + _TIDY_SECONDS
        seen: set[str] = set()
        at_work: dict[str, Iterator[None]] = {}
        failure: Exception | None = None
        while not self.thread.is_closing:
            for batch in self.table.validating(self._capabilities.model_key):
                if batch.id not in seen:
                    at_work[batch.id] = self._store(batch.id)
                seen.add(batch.id)
            if not at_work:
                break
            for id, steps in list(at_work.items()):
                try:
                    next(steps)
                except StopIteration:
                    del at_work[id]
                except Exception as error:  # an error of one batch must not stop the other batches
                    failure = error
                    del at_work[id]
        if failure is not None:
            raise failure

    def _store(self, id: str) -> Iterator[None]:
        """Turn the lines of a batch into jobs, some at a time, unless another server is doing so.

        Each `yield` lets another batch continue.
        """
        with self._queue.backend.lock(id) as is_held:
            batch = self.table.get(id)
            if not is_held or batch is None or not _is_validating(batch):
                return
            file = self.table.file(batch.input_file)
            if file is None:
                error = ApiError(404, "file_not_found", f"{batch.input_file} was removed")
                self._fail(batch, [{"line": None, "code": error.code, "message": error.message}])
                return
            decoded = self._decoded.setdefault(id, {})
            owner = Owner(batch.owner)
            with self.content(file).open("rb") as source:
                faults = _Faults()
                if batch.stored == 0:
                    yield from self._check_images(source, batch, owner, decoded, faults)
                if not faults.total:
                    yield from self._store_lines(source, batch, owner, decoded, faults)
            if faults.total:
                self._fail(batch, faults.faults)
            self._decoded.pop(id, None)
            ended = self.table.get(id)
            if ended is None or not _is_validating(ended):
                self._remove_file(file)

    def _fail(self, batch: Batch, errors: Sequence[dict[str, Any]]) -> None:
        if self.table.fail(batch.id, errors):
            logger.warning("{} is failed: {}", batch.id, errors[0]["message"])

    def _check_images(
        self,
        source: BinaryIO,
        batch: Batch,
        owner: Owner,
        decoded: DecodedImages,
        faults: _Faults,
    ) -> Iterator[None]:
        """Decode the images of all lines, some at a time; add what is faulty to `faults`."""

        def check(line: _CheckedLine) -> tuple[_CheckedLine, ApiError | None]:
            try:
                self._check_uploads(line.request, line.job, decoded)
            except SvdppError as error:
                return line, _fault_of(error)
            return line, None

        lines = self._lines(source, owner, batch.id, batch.loras, faults)
        with ThreadPoolExecutor(MAX_DECODERS) as pool:
            while some := _take(lines, _DECODED_LINES):
                for line, fault in pool.map(check, some):
                    if fault is not None:
                        faults.add(line.number, line.custom_id, fault)
                if faults.total >= MAX_FAULTS:
                    return
                yield

    def _store_lines(
        self,
        source: BinaryIO,
        batch: Batch,
        owner: Owner,
        decoded: DecodedImages,
        faults: _Faults,
    ) -> Iterator[None]:
        """Store those lines that are not jobs yet as jobs, some at a time."""
        lines = self._lines(source, owner, batch.id, batch.loras, faults)
        lines = islice(lines, batch.stored, None)
        while some := _take(lines, _STORED_LINES):
            if faults.total:
                return
            until = uptime() + ORPHAN_SCAN_SECONDS / 2
            with ExitStack() as uploads:
                try:
                    jobs = list(self._jobs(some, batch, uploads, decoded, faults))
                    if faults.total or not self.table.add_lines(batch, jobs, until=until):
                        return  # the batch was cancelled, or another server has stored the lines
                except BackendUnavailableError:
                    # The uploads are kept, because the database may have stored the jobs.
                    uploads.pop_all()
                    raise
                uploads.pop_all()
            batch = replace(batch, stored=batch.stored + len(jobs))
            self._on_stored()
            yield
        if batch.stored == batch.total:
            logger.info("the lines of {} are videos now", batch.id)

    def _jobs(
        self,
        lines: Iterable[_CheckedLine],
        batch: Batch,
        uploads: ExitStack,
        decoded: DecodedImages,
        faults: _Faults,
    ) -> Iterator[Job]:
        """Store the files of lines, and yield each line's job.

        `uploads` gets a callback for each stored file, which removes the file if storing the jobs
        fails.
        """
        now = self._queue.now()
        for index, line in enumerate(lines, start=batch.stored):
            try:
                values = self._save_uploads(line.request, line.job, uploads, decoded)
            # The images were checked by an earlier server process, and now one of them cannot be
            # decoded.
            except SvdppError as error:
                faults.add(line.number, line.custom_id, _fault_of(error))
                return
            yield replace(
                line.job,
                **values,
                created_at=now,
                batch_id=batch.id,
                custom_id=line.custom_id,
                batch_line=index,
            )

    def _tidy(self) -> None:
        """Finish cancellations that killed servers began; remove old files and empty batches."""
        for id in self.table.half_cancelled():
            self._cancel_jobs(id)
        before = -math.inf
        if self._clock.is_settled:
            with suppress(ClockError):  # the fleet's thread logs that clocks differ
                self._queue.check_clock()
                before = self._queue.now() - self.keep_seconds
        for file in self.table.files_before(before):
            self._remove_file(file)
        self.table.remove_ended(before)


def _take(lines: Iterator[_CheckedLine], most: int) -> list[_CheckedLine]:
    """Take at most `most` of the next lines; stop when their images exceed `_SLICE_BYTES`."""
    taken: list[_CheckedLine] = []
    size = 0
    for line in islice(lines, most):
        taken.append(line)
        size += sum(file.size or 0 for file in line.request.files.values())
        if size >= _SLICE_BYTES:
            break
    return taken


def _is_validating(batch: Batch) -> bool:
    return batch.state is BatchState.VALIDATING and batch.cancelled_at is None


def _read_lines(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each line that is not empty.

    Lines that are too long are truncated.
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
    """Parse a line, without a check of the request in its body.

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
        message = f"it is no JSON object: {reason}"
        raise ApiError(422, "invalid_json", message, reason=reason) from None
    try:
        return _Line.model_validate(values)
    except ValidationError as error:
        faults = [
            {"field": ".".join(map(str, each["loc"])), "reason": describe_fault(each)}
            for each in error.errors(include_url=False)
        ]
        text_ = "; ".join(f"{fault['field']} {fault['reason']}" for fault in faults)
        hint = 'each line is {"custom_id", "method": "POST", "url": "/v1/videos", "body"}'
        raise ApiError(422, "invalid_line", text_, hint, faults=faults) from None


def _custom_id_in(text: bytes) -> str | None:
    """Return the `custom_id` of a faulty line; None if the line has none."""
    with suppress(ValueError, RecursionError):
        values = json.loads(text)
        if isinstance(values, dict) and isinstance(values.get("custom_id"), str):
            return str(values["custom_id"])[:_MAX_CUSTOM_ID]
    return None


def _fault_of(error: SvdppError) -> ApiError:
    """Convert an error to the fault of a line. Errors of the server itself are raised again."""
    fault = to_api_error(error)
    if fault.status >= 500:
        raise error
    return fault


def _faulty_error(faults: _Faults) -> ApiError:
    first = [f"line {fault['line']}: {fault['message']}" for fault in faults.faults[:3]]
    number = len(faults.lines)
    text = f"{number} line{'s have' if number > 1 else ' has'} faults: {'; '.join(first)}"
    return ApiError(
        422,
        "invalid_batch",
        text,
        "details.faults has all of them; nothing of the batch is stored",
        faults=faults.faults,
        num_faults=faults.total,
    )


def _full_error(details: dict[str, Any]) -> ApiError:
    num_open, limit, lines = (details[name] for name in ("open", "limit", "lines"))
    scope = "this key" if "owner" in details else "all batches of this server"
    values = {"open": num_open, "limit": limit, "lines": lines}
    if lines > limit:
        text = f"the batch has {lines} lines, and {scope} may have {limit} open clips"
        return ApiError(422, "batch_too_large", text, "split the file", **values)
    text = f"the batch has {lines} lines, and {num_open} of {limit} clips of {scope} are open"
    return ApiError(429, "queue_full", text, "send it again later", retry=60, **values)


def _result_of(job: Job, video: Video) -> BatchLineResult:
    response: dict[str, Any] | None = {"status_code": 200, "request_id": job.id, "body": video}
    error = None
    if job.state is JobState.CANCELLED:
        response, error = None, LineError(code="batch_cancelled", message="it was cancelled")
    elif job.error is not None and video.error is not None:
        status = to_api_error(error_from_dict(job.error)).status
        response = {"status_code": status, "request_id": job.id, "body": video}
        error = LineError(code=video.error.code, message=video.error.message)
    id = f"batch_req_{job.id.removeprefix('video_')}"
    return BatchLineResult.model_validate(
        {"id": id, "custom_id": job.custom_id, "response": response, "error": error}
    )
