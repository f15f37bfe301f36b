"""Batches of requests: the lines of an uploaded file become jobs, once all lines are checked.

The fields of all lines are checked before a batch is accepted, so the client gets the faults of all
lines at once. Decoding thousands of images takes minutes. So a thread decodes the images later,
while the state of the batch is `validating`, and then stores the jobs, some lines at a time. The
batch's row counts the lines that are jobs already. After a crash, the restarted server, or another
server with the same queue, continues with the next line.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import islice
from typing import Any, BinaryIO

from loguru import logger

from svdpp.errors import OutputError, SvdppError, pluralize
from svdpp.serve.auth import Owner
from svdpp.serve.batch_files import BatchFiles
from svdpp.serve.batch_lines import (
    MAX_FAULTS,
    BatchLineReader,
    CheckedLine,
    LineFaults,
    line_fault,
    line_result,
    take_lines,
)
from svdpp.serve.batch_table import Batch, BatchFile, BatchState, BatchTable, check_same_batch
from svdpp.serve.clock import ClockError, SteadyClock, uptime
from svdpp.serve.job import Job, JobState
from svdpp.serve.periodic_thread import PeriodicThread
from svdpp.serve.queue import JobQueue, QueueFullError
from svdpp.serve.request_files import RequestFiles
from svdpp.serve.request_schema import Capabilities, VideoRequest
from svdpp.serve.retention import ORPHAN_SCAN_SECONDS
from svdpp.serve.schemas import ApiError, Video
from svdpp.serve.sqlite import BackendUnavailableError
from svdpp.serve.uploads import MAX_DECODERS, DecodedImages, UploadStore

#: Maximum number of open lines of all batches together. A line is open until its job has ended.
MAX_OPEN_LINES = 20_000
#: Maximum age in seconds of failed batches, and of files that no batch reads.
RETENTION_SECONDS = 86400

#: API route of the requests in the lines of a batch.
ENDPOINT = "/v1/videos"
# First value: seconds between two searches for batches that other servers have accepted. Second
# value: seconds between two cleanups; see `Batches._tidy`.
_LOOK_SECONDS, _TIDY_SECONDS = 10.0, 60.0
# Number of lines of one batch that are processed before another batch gets its turn. The first
# value applies while images are decoded, the second while lines become jobs.
_DECODED_LINES, _STORED_LINES = 16, 100


class Batches:
    """Operations on the batches of a server. Any thread may call any method."""

    def __init__(
        self,
        queue: JobQueue,
        capabilities: Capabilities,
        *,
        uploads: UploadStore,
        request_files: RequestFiles,
        keep_seconds: float | None,
        check_accepts_jobs: Callable[[], None],
        new_job: Callable[[VideoRequest, Owner, str | None, Mapping[str, str]], Job],
        cancel_job: Callable[[str], bool],
        on_stored: Callable[[], None],
        on_cancelled: Callable[[int], None],
    ) -> None:
        """Create the thread that turns the lines of batches into jobs, but do not start it.

        Args:
            queue: Queue of the jobs.
            capabilities: Limits for the requests in lines.
            uploads: Folder of uploaded files.
            request_files: Checker and store of the images and videos in requests.
            keep_seconds: Age in seconds at which clips are removed; None: clips are kept.
            check_accepts_jobs: Function that raises if the server accepts no jobs now.
            new_job: Function that checks the fields of a request, and returns the job; see
                `BatchLineReader`.
            cancel_job: Function that cancels a job in progress.
            on_stored: Function that is called after lines have become jobs.
            on_cancelled: Function that gets the number of waiting jobs that were cancelled.
        """
        self.table = BatchTable(queue)
        """Table with the rows of the batches."""
        self.files = BatchFiles(queue, self.table, uploads, check_accepts_jobs)
        """Uploaded files with the lines of batches."""
        self._queue = queue
        self._model_key = capabilities.model_key
        self._lines = BatchLineReader(capabilities, new_job)
        self._request_files = request_files
        self.keep_seconds = min(keep_seconds or RETENTION_SECONDS, RETENTION_SECONDS)
        """Age in seconds at which failed batches, and uploaded files that no batch reads, are
        removed."""
        self._check_accepts_jobs = check_accepts_jobs
        self._cancel_job = cancel_job
        self._on_stored = on_stored
        self._on_cancelled = on_cancelled
        self._clock = SteadyClock()
        self._tidy_at = 0.0
        # Results of decoding images, by the id of the batch. They are kept after a failure of the
        # disk, so that a retry does not decode the images again.
        self._decoded: dict[str, DecodedImages] = {}
        self.thread = PeriodicThread(
            "batches", self._run_once, _LOOK_SECONDS, error_message="batches are not processed"
        )
        """Thread that turns the lines of accepted batches into jobs."""

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
        """Check the fields of all lines of a batch, and store the batch durably; return it.

        If an earlier request had the same idempotency key, the batch of that request is returned.

        Args:
            owner: Owner of the batch.
            idempotency_key: Key that is the same in repetitions of a request; None: no key.
            input_file_id: Id of the stored file with the lines; None: `source` has the lines.
            source: Open file with the lines; None: `input_file_id` names a stored file.
            name: File name of `source` from the client.
            completion_window: Time limit from the client, which has no effect.
            metadata: Text values by name from the client, which responses about the batch include.

        Raises:
            ApiError: A line has a fault, a limit is reached, or the file does not exist.
            RequestError: The idempotency key was used for another batch.
            OutputError: The batch cannot be stored.
        """
        self._check_accepts_jobs()
        existing = None
        if idempotency_key is not None:
            existing = self.table.find(owner.name, idempotency_key=idempotency_key)
        if existing is not None and existing.input_file == input_file_id:
            return existing  # without checks, because the input file may no longer exist
        file, total, loras = self._check_lines(owner, input_file_id, source, name)
        batch = Batch(
            id=f"batch_{secrets.token_hex(16)}",
            owner=owner.name,
            model_key=self._model_key,
            created_at=self._queue.now(),
            input_file=file.id,
            input_sha256=file.sha256,
            total=total,
            completion_window=completion_window,
            metadata=metadata or {},
            loras=loras,
            idempotency_key=idempotency_key,
        )
        try:
            if existing is not None:
                return check_same_batch(existing, batch)
            stored = self.table.add(batch, MAX_OPEN_LINES, owner.max_open)
        except QueueFullError as error:
            raise _full_error(error.details) from error
        finally:
            # This request stored the file, and nobody needs the file if the batch was not stored.
            if input_file_id is None and not self._is_stored(batch):
                with suppress(OutputError):
                    self.files.discard(file)
        if stored.id == batch.id:
            logger.info("{} is requested, with {}", batch.id, pluralize(total, "line"))
            self.thread.wake()
        return stored

    def _check_lines(
        self, owner: Owner, input_file_id: str | None, source: BinaryIO | None, name: str
    ) -> tuple[BatchFile, int, dict[str, str]]:
        """Check the fields of a batch's lines; store `source` if there is no `input_file_id`.

        Returns:
            File with the lines; number of lines; SHA-256 of each LoRA in the lines, by name.
        """
        if input_file_id is None:
            assert source is not None
            total, loras = self._lines.check_all(source, owner)
            return self.files.add(source, name, owner), total, loras
        file = self.files.get(input_file_id, owner)
        with self.files.content(file).open("rb") as stored:
            total, loras = self._lines.check_all(stored, owner)
        return file, total, loras

    def _is_stored(self, batch: Batch) -> bool:
        """Whether the queue may have stored the batch; True if the queue does not answer."""
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
        """Cancel the unfinished clips of a batch, if there are any; return the batch.

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
        """Cancel the unfinished jobs of a batch that was cancelled or has failed."""
        while cancelled := self.table.cancel_waiting(id):
            self._on_cancelled(len(cancelled))
        for job_id in self.table.running(id):
            self._cancel_job(job_id)

    # --- results of batches -----------------------------------------------------------------------

    def results(self, batch: Batch, *, errors: bool, view: Callable[[Job], Video]) -> Iterator[str]:
        """Yield the result lines that a batch's output file, or its error file, has so far.

        Args:
            batch: Batch.
            errors: Whether to yield the error file, for jobs that failed or were cancelled. False:
                the output file, for completed jobs.
            view: Function that returns the API's representation of a job.

        Raises:
            OutputError: The queue cannot be read.
        """
        states = (JobState.FAILED, JobState.CANCELLED) if errors else (JobState.COMPLETED,)
        for job in self.table.jobs(batch.id, states):
            yield line_result(job, view(job)).model_dump_json() + "\n"

    # --- methods for the thread that turns lines into jobs ----------------------------------------

    def _run_once(self) -> None:
        """Turn the lines of all accepted batches into jobs, some lines of each batch in turn."""
        if uptime() >= self._tidy_at:
            self._tidy()
            self._tidy_at = uptime() + _TIDY_SECONDS
        seen: set[str] = set()
        at_work: dict[str, Iterator[None]] = {}
        failure: Exception | None = None
        while not self.thread.is_closing:
            batches = self.table.validating(self._model_key)
            self._forget_decoded(batches)
            for batch in batches:
                if batch.id not in seen:
                    at_work[batch.id] = self._process_batch(batch.id)
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

    def _forget_decoded(self, validating: Iterable[Batch]) -> None:
        """Drop the results of decoding images of all batches that are no longer `validating`.

        After a failure, the results are kept for a retry. A batch that was cancelled, or that
        another server has finished, is not retried.
        """
        ended = self._decoded.keys() - {batch.id for batch in validating}
        for id in ended:
            del self._decoded[id]

    def _process_batch(self, id: str) -> Iterator[None]:
        """Check the images of a batch, and turn its lines into jobs, some at a time.

        At each `yield`, another batch gets its turn. If another server works on the batch, this
        method does nothing.
        """
        with self._queue.backend.lock(id) as is_held:
            batch = self.table.get(id)
            if not is_held or batch is None or not _is_validating(batch):
                return
            owner = Owner(batch.owner)
            try:
                file = self.files.get(batch.input_file, owner)
                path = self.files.content(file)
            except ApiError as error:  # the row or the content of the file was removed
                self._fail(batch, [{"line": None, "code": error.code, "message": error.message}])
                return
            decoded = self._decoded.setdefault(id, {})
            with path.open("rb") as source:
                faults = LineFaults()
                if batch.stored == 0:
                    yield from self._check_images(source, batch, owner, decoded, faults)
                if not faults.total:
                    yield from self._store_lines(source, batch, owner, decoded, faults)
            if faults.total:
                self._fail(batch, faults.faults)
            self._decoded.pop(id, None)
            ended = self.table.get(id)
            if ended is None or not _is_validating(ended):
                self.files.discard(file)

    def _fail(self, batch: Batch, errors: Sequence[dict[str, Any]]) -> None:
        """Set a batch to failed, and cancel the jobs that already exist for some of its lines."""
        if self.table.fail(batch.id, errors):
            logger.warning("{} failed: {}", batch.id, errors[0]["message"])
            self._cancel_jobs(batch.id)

    def _check_images(
        self,
        source: BinaryIO,
        batch: Batch,
        owner: Owner,
        decoded: DecodedImages,
        faults: LineFaults,
    ) -> Iterator[None]:
        """Decode the images in all lines of a batch, some at a time; add each fault to `faults`."""

        def check(line: CheckedLine) -> tuple[CheckedLine, ApiError | None]:
            try:
                self._request_files.check(line.request, line.job, decoded)
            except SvdppError as error:
                return line, line_fault(error)
            return line, None

        lines = self._lines.read(source, owner, batch.id, batch.loras, faults)
        with ThreadPoolExecutor(MAX_DECODERS) as pool:
            while some := take_lines(lines, _DECODED_LINES):
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
        faults: LineFaults,
    ) -> Iterator[None]:
        """Store jobs for the lines of a batch that are not jobs yet, some at a time."""
        lines = self._lines.read(source, owner, batch.id, batch.loras, faults)
        lines = islice(lines, batch.stored, None)
        while some := take_lines(lines, _STORED_LINES):
            if faults.total:
                return
            # The jobs must be stored before `until`. Later, a search for unneeded files may remove
            # the images of the lines, because no job in the queue needs them yet.
            until = uptime() + ORPHAN_SCAN_SECONDS / 2
            with ExitStack() as uploads:
                try:
                    jobs = list(self._jobs(some, batch, uploads, decoded, faults))
                    if faults.total or not self.table.add_lines(batch, jobs, until=until):
                        return  # a line has a fault, or the batch has changed since it was read
                except BackendUnavailableError:
                    # The images are kept, because the database may have stored the jobs before the
                    # failure.
                    uploads.pop_all()
                    raise
                uploads.pop_all()
            batch = replace(batch, stored=batch.stored + len(jobs))
            self._on_stored()
            yield
        if batch.stored == batch.total:
            logger.info("all lines of {} have become jobs", batch.id)

    def _jobs(
        self,
        lines: Iterable[CheckedLine],
        batch: Batch,
        uploads: ExitStack,
        decoded: DecodedImages,
        faults: LineFaults,
    ) -> Iterator[Job]:
        """Store the images and videos of a batch's lines, and yield each line's job.

        For each stored file, `uploads` gets a callback that removes the file. The caller cancels
        the callbacks once the jobs are stored.
        """
        now = self._queue.now()
        for index, line in enumerate(lines, start=batch.stored):
            try:
                values = self._request_files.save(line.request, line.job, uploads, decoded)
            # An image that passed `_check_images` is decoded again if another server process ran
            # that check, and can then be rejected. The fault makes the batch fail.
            except SvdppError as error:
                faults.add(line.number, line.custom_id, line_fault(error))
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
        """Cancel the remaining jobs of cancelled batches; remove old batches and batch files.

        Jobs remain if a server is killed while it cancels the jobs of a cancelled or failed batch.
        """
        for id in self.table.half_cancelled():
            self._cancel_jobs(id)
        before = -math.inf
        if self._clock.is_settled:
            with suppress(ClockError):  # the thread of `Fleet` logs that the clocks differ
                self._queue.check_clock()
                before = self._queue.now() - self.keep_seconds
        self.files.remove_older(before)
        self.table.remove_ended(before)


def _is_validating(batch: Batch) -> bool:
    return batch.state is BatchState.VALIDATING and batch.cancelled_at is None


def _full_error(details: dict[str, Any]) -> ApiError:
    num_open, limit, lines = (details[name] for name in ("open", "limit", "lines"))
    scope = "this key" if "owner" in details else "all batches of this server"
    values = {"open": num_open, "limit": limit, "lines": lines}
    if lines > limit:
        has, most = pluralize(lines, "line"), pluralize(limit, "open clip")
        text = f"the batch has {has}, a clip each, but {scope} may have at most {most}"
        return ApiError(422, "batch_too_large", text, "split the file", **values)
    text = (
        f"the {pluralize(lines, 'line')} of the batch and the {pluralize(num_open, 'open clip')} "
        f"of {scope} exceed the limit of {pluralize(limit, 'open clip')}"
    )
    return ApiError(429, "queue_full", text, "send it again later", retry=60, **values)
