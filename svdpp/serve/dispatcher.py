"""Dispatcher that sends queued jobs to the ranks and records the jobs' results."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, TypeVar

from loguru import logger

from svdpp.config import PipelineConfig
from svdpp.driver.clips import ClipHandle
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import ClosedError, InputError, OutputError, RankError, SvdppError
from svdpp.serve.clips import RequestBuilder, RunningClip
from svdpp.serve.job import Job
from svdpp.serve.queue import JobQueue
from svdpp.serve.sqlite import BackendUnavailableError
from svdpp.worker.messages import Event, ImageReady

_T = TypeVar("_T")

#: Maximum number of attempts at one clip. An attempt fails when ranks die while they make the clip.
MAX_ATTEMPTS = 2

_RETRY_SECONDS = 1.0
# Number of latest clips whose jobs are remembered, because ranks may still report events of clips
# that have just ended. It is far larger than the number of clips that the ranks make at one time.
_MAX_RECENT_JOBS = 1000
# Assumed seconds per pixel to prepare an image, until a time is measured.
_SECONDS_PER_PIXEL = 6e-8


class Dispatcher:
    """Dispatcher that claims jobs, submits them to the ranks, and records the jobs' results.

    Args:
        config: Resolved configuration of the pipeline.
        queue: Queue of the jobs.
        request_builder: Converter of jobs into requests.
        on_changed: Function that is called with a job after each change of the job's state.
        changed: Condition that is notified when the dispatcher may have work.
        seconds_left: Function that returns the seconds until the end of the grace period; infinity
            while the server is not closing.
    """

    def __init__(
        self,
        config: PipelineConfig,
        queue: JobQueue,
        request_builder: RequestBuilder,
        on_changed: Callable[[Job], None],
        changed: threading.Condition,
        seconds_left: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._request_builder = request_builder
        self._on_changed = on_changed
        self._changed = changed
        self._seconds_left = seconds_left
        # Maximum number of clips in the pipeline: one for each rank, and one more that waits at the
        # first rank of each replica.
        self._max_running = config.world_size + config.parallel.data_parallel_size
        # Maximum number of clips in the pipeline that no rank has begun.
        self._max_waiting = 2 * config.parallel.data_parallel_size
        self._next_clip = 0
        self._clips: dict[str, RunningClip] = {}
        self.recent_jobs: dict[int, Job] = {}
        """Jobs by the index of their clip in the pipeline. Jobs of ended clips stay for a while,
        because ranks may still report events of these clips."""
        self._done: deque[tuple[str, ClipHandle, bool]] = deque()
        self._to_cancel: set[str] = set()
        # Ids of jobs that this server has retried because a file could not be read or written.
        self._retried_files = deque[str](maxlen=_MAX_RECENT_JOBS)
        self._num_encoders = sum(roles.encode for roles in config.layout.roles)
        self.preparing: RunningClip | None = None
        """Clip whose large image the ranks prepare while they make other clips. None: no image is
        being prepared."""
        self._seconds_per_pixel = _SECONDS_PER_PIXEL
        self._is_woken = True
        self._is_queue_empty = False
        self.has_latents = True
        """Whether the data folder may have latent checkpoints, even after all jobs have ended."""
        self.unavailable_reason = ""
        """Reason why no clip is begun or accepted, such as a full disk; empty if clips can be
        made."""
        self.num_completed = 0
        """Number of clips that the ranks have finished."""

    # --- methods for any thread -------------------------------------------------------------------

    def wake(self) -> None:
        """Wake the dispatcher: a job may have been queued."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def request_cancel(self, job_id: str) -> None:
        """Make the engine's thread cancel the clip of a job, if the pipeline has the clip."""
        with self._changed:
            self._to_cancel.add(job_id)
            self._changed.notify_all()

    def revoke(self, claims: Iterable[tuple[str, int]]) -> None:
        """Cancel the clips of jobs whose claims this server has lost.

        Args:
            claims: Lost claims, each as (job id, fencing token). The token is the value that
                `Job.fencing_token` had after the claim: 1 for the job's first claim, and so on. It
                is 0 if the queue is not shared.
        """
        for id, token in claims:
            clip = self.get(id)
            if clip is not None and clip.job.fencing_token == token:
                clip.is_revoked = True
                logger.warning(
                    "the claim of {} was not renewed in time: another server may make the clip", id
                )
                self.request_cancel(id)

    def notify_changed(self, job_id: str) -> Job | None:
        """Read a job, pass it to `on_changed`, and return it; None if the queue has removed it."""
        job = self._queue.get(job_id)
        if job is not None:
            if job.state.is_final:
                logger.info("{} is {}", job_id, job.state)
            self._on_changed(job)
        return job

    def image_ready(self, rank: int, event: Event) -> None:  # noqa: ARG002
        """Record that a rank has prepared a large image (`ImageReady`). Ignore other events."""
        clip = self.preparing
        if isinstance(event, ImageReady) and clip and clip.request.image == event.image:
            clip.ranks_left -= 1
            if event.seconds is not None:
                self._seconds_per_pixel = event.seconds / clip.job.input_pixels
            self.wake()

    @property
    def num_free_slots(self) -> int:
        """Number of further jobs that can be submitted to the pipeline now."""
        num_waiting = sum(not clip.has_started for clip in self.clips())
        return max(0, min(self._max_running - len(self._clips), self._max_waiting - num_waiting))

    def clips(self) -> list[RunningClip]:
        """Return the clips in the pipeline, in the order in which the ranks begin them."""
        with self._changed:
            return list(self._clips.values())

    def get(self, job_id: str) -> RunningClip | None:
        """Return a job's clip if the ranks have the clip or prepare its image; else None."""
        preparing = self.preparing
        is_preparing = preparing is not None and preparing.job.id == job_id
        return preparing if is_preparing else self._clips.get(job_id)

    def steps_done(self, job_id: str) -> int:
        """Return the number of a job's finished denoising steps; 0 if its clip is not running."""
        clip = self.get(job_id)
        return 0 if clip is None else clip.progress.steps_done

    def job_id_of(self, clip: int | None) -> str | None:
        """Return the id of the job whose clip has index `clip` in the pipeline; None if unknown."""
        job = None if clip is None else self.recent_jobs.get(clip)
        return None if job is None else job.id

    @property
    def is_empty(self) -> bool:
        """Whether no job is left, neither on the ranks nor in the queue."""
        is_empty = self._is_queue_empty and not self._is_woken and self.preparing is None
        return is_empty and not self._clips

    # --- methods for the engine's thread only -----------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `run_once` can record results, forward cancellations, or claim a job now."""
        return bool(self._done or self._to_cancel) or self._can_claim

    @property
    def _can_claim(self) -> bool:
        is_prepared = self.preparing is not None and self.preparing.is_prepared
        return (
            (self._is_woken or not self._is_queue_empty or is_prepared)
            and not self.unavailable_reason
            and not self._queue.store.unavailable_reason
            and self._seconds_left() == math.inf
            and self.num_free_slots > 0
            # While a clip still runs whose claim this server has lost, the server could claim the
            # same job again, and make the clip twice.
            and not any(clip.is_revoked for clip in self.clips())
        )

    def reset(self) -> None:
        """Forget the clip indices of a pipeline that has ended, before the next pipeline starts."""
        self._next_clip = 0
        self.recent_jobs.clear()
        self.preparing = None

    def run_once(self, pipeline: Pipeline) -> None:
        """Record results, forward cancellations to ranks, and submit claimed jobs to `pipeline`."""
        self.record_results()
        self._forward_cancellations()
        self._check_storage()
        while self._can_claim:
            # The flags are reset before the queue is read. Otherwise a `wake` during the read would
            # be lost.
            self._is_queue_empty = self._is_woken = False
            if (clip := self.preparing) is not None and clip.is_prepared:
                self.preparing = None
                self._submit(pipeline, clip)
                continue
            job = self._retry_while_unavailable(
                lambda: self._queue.claim(large=self.preparing is None)
            )
            self._is_queue_empty = job is None
            if job is None:
                break
            self.has_latents = True
            self._start(pipeline, job)
        if self.has_latents and self._is_queue_empty and not self._clips:
            # A server that was killed just after a clip ended may have left the clip's latent
            # checkpoints.
            if not self._retry_while_unavailable(self._queue.has_unfinished):
                self._request_builder.remove_all_latents()
            self.has_latents = False

    def _check_storage(self) -> None:
        """Update `unavailable_reason` from the state of the queue and the disk; log a change."""
        before, self.unavailable_reason = self.unavailable_reason, self._queue.unavailable_reason
        if self.unavailable_reason not in ("", before):
            logger.error("{}: no clip is begun or accepted", self.unavailable_reason)
        elif before and not self.unavailable_reason:
            logger.warning("the data folder can be used again")

    def _start(self, pipeline: Pipeline, job: Job) -> None:
        """Submit a claimed job to the ranks, or let the ranks prepare its large image first."""
        # A clip that is still running belongs to an earlier claim of the job, which this server has
        # lost. The clip is cancelled, and the job goes back to the queue.
        if (running := self.get(job.id)) is not None:
            self.revoke([(job.id, running.job.fencing_token)])
            self._requeue(job)
            return
        try:
            clip = self._request_builder(job)
        # The job goes back to the queue, because another server may be able to reach its files.
        except BackendUnavailableError:
            self._requeue(job)
            self._check_storage()
            return
        except Exception as error:
            self._fail_or_requeue(job, error)
            return
        if not self._start_preparing(pipeline, clip):
            self._submit(pipeline, clip)

    def _start_preparing(self, pipeline: Pipeline, clip: RunningClip) -> bool:
        """Let the ranks prepare a clip's image before the clip is submitted, if the image is large.

        Other jobs are submitted meanwhile.

        Returns:
            Whether the ranks prepare the image. False: the clip can be submitted at once.
        """
        if self.preparing is not None or not clip.job.has_large_image or clip.request.done_steps:
            return False
        clip.ranks_left = self._num_encoders
        clip.prepared_at = time.monotonic() + self._seconds_per_pixel * clip.job.input_pixels
        self.preparing = clip  # the clip is stored before the ranks can report `ImageReady`
        try:
            pipeline.prepare_image(clip.request)
        except SvdppError:  # `_submit` will get the same error, and record it
            self.preparing = None
        return self.preparing is not None

    def _submit(self, pipeline: Pipeline, clip: RunningClip) -> None:
        job = clip.job
        with self._changed:
            self._clips[job.id] = clip
            self.recent_jobs[self._next_clip] = job
            self.recent_jobs.pop(self._next_clip - _MAX_RECENT_JOBS, None)
        try:
            clip.handle = pipeline.submit(clip.request, [clip.metadata])
        except Exception as error:
            if pipeline.run_error is not None or isinstance(error, ClosedError):
                raise
            self._record_failed(job, error)
            self._remove(job.id)
            return
        self._next_clip += 1
        clip.handle.add_progress_callback(lambda _: self._on_progress(clip))
        clip.handle.add_done_callback(functools.partial(self._on_done, pipeline, job.id))
        self._retry_while_unavailable(lambda: self.notify_changed(job.id))

    def _on_progress(self, clip: RunningClip) -> None:
        """Store the time of a clip's progress, and wake the threads that wait for changes.

        The pipeline's thread calls this method.
        """
        with self._changed:
            clip.progressed_at = time.monotonic()
            self._changed.notify_all()

    def _on_done(self, pipeline: Pipeline, job_id: str, handle: Any) -> None:
        """Add a completed, failed or cancelled clip to `_done`; wake the engine's thread.

        `record_results` records the clip later.

        The pipeline's thread calls this method.
        """
        with self._changed:
            self._done.append((job_id, handle, pipeline.run_error is not None))
            self._changed.notify_all()

    def _forward_cancellations(self) -> None:
        with self._changed:
            job_ids, self._to_cancel = self._to_cancel, set()
        for job_id in job_ids:
            clip = self.get(job_id)
            if clip is not None and clip is self.preparing:
                self.preparing = None
                # No image is being prepared any more, so the next job with a large image can be
                # claimed.
                self._is_queue_empty = False
                self._record_cancelled(clip.job)
            elif clip is not None and clip.handle is not None:
                clip.handle.cancel()

    def record_results(self) -> None:
        """Record in the queue the clips that are completed, have failed, or were cancelled."""
        while self._done:
            self._record_result(*self._done[0])
            self._done.popleft()

    def _record_result(self, job_id: str, handle: ClipHandle, run_has_ended: bool) -> None:
        clip = self._clips[job_id]
        try:
            result = handle.result()
        except CancelledError:
            self._record_cancelled(clip.job)
        except BaseException as error:
            if run_has_ended or isinstance(error, ClosedError):
                return  # The pipeline has ended; `requeue_all` puts the job back.
            self._record_failure(clip, error)
        else:
            self._record_completed(clip.job, result.metadata)
            self.num_completed += 1
        self._remove(job_id)

    def _record_cancelled(self, job: Job) -> None:
        if self._apply(job, lambda: self._queue.mark_cancelled(job.id, job.fencing_token)):
            self._request_builder.remove_latents(job)

    def _record_failure(self, clip: RunningClip, error: BaseException) -> None:
        if isinstance(error, InputError) and clip.request.done_steps:
            # The latent checkpoint may be the cause of the failure. It is removed, and the clip
            # starts again.
            logger.warning("{} is made again: {}", clip.job.id, error)
            self._request_builder.remove_latents(clip.job)
            self._requeue(clip.job)
        else:
            self._fail_or_requeue(clip.job, error)

    def _fail_or_requeue(self, job: Job, error: BaseException) -> None:
        """Requeue a job if the error may be a short failure of the disk; else set it to failed."""
        if not self._queue.store.is_mounted:
            logger.warning("{} is made again once its files can be read: {}", job.id, error)
            self._requeue(job)
            self._check_storage()
        elif isinstance(error, InputError | OutputError) and job.id not in self._retried_files:
            # The disk may have failed only for a moment, because the input was readable when it was
            # uploaded. So the job is tried once more.
            logger.warning("{} is made again: {}", job.id, error)
            self._retried_files.append(job.id)
            self._requeue(job)
        elif self._record_failed(job, error):
            self._request_builder.remove_latents(job)

    def requeue_all(self, error: BaseException, blamed: set[str]) -> None:
        """Requeue all jobs that this server has claimed, after the ranks have ended.

        Args:
            error: Error that has ended the ranks.
            blamed: Ids of the jobs that ranks worked on when they died. The death of a rank counts
                as a failed attempt of such a job. A job with `MAX_ATTEMPTS` failed attempts fails,
                and is not requeued.
        """
        message = f"the ranks died {MAX_ATTEMPTS} times during this clip; the last time: {error}"
        hint, details = getattr(error, "hint", ""), getattr(error, "details", {})
        details = {**details, "attempts": MAX_ATTEMPTS}
        for clip in self.clips():
            is_blamed = clip.job.id in blamed
            if not (is_blamed and clip.job.attempts + 1 >= MAX_ATTEMPTS):
                self._requeue(clip.job, counts=is_blamed)
            elif self._record_failed(clip.job, RankError(message, hint, details=details)):
                self._request_builder.remove_latents(clip.job)
            self._remove(clip.job.id)
        # Jobs that were claimed, but not yet submitted to the ranks, are requeued too.
        for job in self._retry_while_unavailable(self._queue.claimed):
            self._requeue(job)

    def _remove(self, job_id: str) -> None:
        with self._changed:
            self._clips.pop(job_id, None)
            self._changed.notify_all()

    def _record_completed(self, job: Job, metadata: dict[str, Any]) -> None:
        clip = job.clip_path(self._request_builder.folder)
        for path in (clip, Path(f"{clip}.json")):
            self._retry_while_unavailable(functools.partial(self._queue.store.put, path))
        if "file_sha256" in metadata and not clip.exists():
            # The clip's file was removed, or another disk has been mounted over its folder.
            logger.warning("{} is made again: the file of the finished clip is missing", job.id)
            self._requeue(job)
            return
        # If another server has claimed the job, this change does nothing, and the clip's file is
        # removed later.
        self._apply(job, lambda: self._queue.complete(job.id, metadata, job.fencing_token))

    def _record_failed(self, job: Job, error: BaseException) -> bool:
        logger.warning("{} failed: {}", job.id, error)
        return self._apply(job, lambda: self._queue.fail(job.id, error, job.fencing_token))

    def _requeue(self, job: Job, *, counts: bool = False) -> None:
        self._apply(job, lambda: self._queue.requeue(job.id, job.fencing_token, counts=counts))
        self._is_queue_empty = False

    def _apply(self, job: Job, change: Callable[[], bool]) -> bool:
        """Change a job in the queue, and call `on_changed`; return whether the job was changed."""
        is_changed = self._retry_while_unavailable(change)
        self._retry_while_unavailable(lambda: self.notify_changed(job.id))
        return is_changed

    def _retry_while_unavailable(self, change: Callable[[], _T]) -> _T:
        """Call a function that uses the queue or the jobs' files; retry until they are available.

        Raises:
            OutputError: The queue or the files are unavailable at the end of the grace period.
        """
        logged = ""
        while True:
            try:
                return change()
            except OutputError as error:
                if self._seconds_left() <= 0:
                    raise
                self._check_storage()
                if not isinstance(error, BackendUnavailableError) and logged != str(error):
                    logged = str(error)
                    logger.error("the queue cannot be used, trying again: {}", error)
                with self._changed:
                    self._changed.wait(min(_RETRY_SECONDS, self._seconds_left()))
