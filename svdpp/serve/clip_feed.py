"""The way of jobs from the queue to the ranks and back; the engine's thread calls it."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from loguru import logger

from svdpp.config import PipelineConfig
from svdpp.driver.clips import ClipHandle
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import ClosedError, InputError, OutputError, RankError, SvdppError
from svdpp.serve.clip_orders import ClipOrders
from svdpp.serve.events import Announcer
from svdpp.serve.job import Job, JobState
from svdpp.serve.running_clips import Outcome, RunningClip, RunningClips
from svdpp.serve.store import JobStore

_T = TypeVar("_T")

#: The deaths of ranks during one clip after which it has failed.
MAX_ATTEMPTS = 2

_DISK_SECONDS = 1.0


class ClipFeed:
    """Takes jobs from the queue as the ranks need them, and records what becomes of them.

    `changed` is notified when there may be something to do; `seconds_left` are those until the end
    of the grace, infinite unless the server ends.
    """

    def __init__(
        self,
        config: PipelineConfig,
        store: JobStore,
        orders: ClipOrders,
        running: RunningClips,
        announcer: Announcer,
        changed: threading.Condition,
        seconds_left: Callable[[], float],
    ) -> None:
        self._store = store
        self._orders = orders
        self._running = running
        self._announcer = announcer
        self._changed = changed
        self._seconds_left = seconds_left
        # Each rank has a clip, and the first rank of each replica has its next one at hand.
        self._max_running = config.world_size + config.replicas
        self._max_waiting = 2 * config.replicas
        self._next_clip = 0
        self._to_cancel: set[str] = set()
        self._is_woken = True
        self._is_queue_empty = False
        self._has_latents = True
        self._is_disk_low = False
        self.num_completed = 0
        """Clips that the ranks have finished."""

    # --- any thread -------------------------------------------------------------------------------

    def wake(self) -> None:
        """Says that the queue may have a job."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def ask_to_cancel(self, job_id: str) -> None:
        """Has the ranks asked to skip a job, which the queue has marked."""
        with self._changed:
            self._to_cancel.add(job_id)
            self._changed.notify_all()

    @property
    def is_empty(self) -> bool:
        """Whether neither the ranks nor the queue have a job."""
        return self._is_queue_empty and not self._is_woken and not self._running

    # --- the engine's thread ----------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether there is something to do at once."""
        return self._running.has_outcome or bool(self._to_cancel) or self._may_take

    @property
    def _may_take(self) -> bool:
        return (
            (self._is_woken or not self._is_queue_empty)
            and not self._is_disk_low
            and self._seconds_left() == math.inf
            and len(self._running) < self._max_running
            and self._running.num_waiting < self._max_waiting
        )

    def begin(self) -> None:
        """Begins with a new pipeline."""
        self._next_clip = 0

    def turn(self, pipeline: Pipeline) -> None:
        """Does what there is to do."""
        self.settle_all()
        self._pass_on_cancels()
        self._look_at_disk()
        while self._may_take:
            self._is_woken = False
            job = self._persist(self._store.take_next)
            self._is_queue_empty = job is None
            if job is not None:
                self._has_latents = True
                self._submit(pipeline, job)
        if self._has_latents and self._is_queue_empty and not self._running:
            # A server that is killed soon after a clip may leave a late checkpoint of it.
            if not self._store.counts(with_held=True)[JobState.QUEUED]:  # held ones may go on
                self._orders.forget_all()
            self._has_latents = False

    def _look_at_disk(self) -> None:
        """Begins no clips on a full disk: each would fail when its file is written."""
        was_low, self._is_disk_low = self._is_disk_low, self._store.is_disk_low
        if self._is_disk_low and not was_low:
            logger.error("the disk of the data folder is nearly full: no clip is begun or taken")
        if was_low and not self._is_disk_low:
            logger.warning("the disk of the data folder has space again: clips are made")

    def _submit(self, pipeline: Pipeline, job: Job) -> None:
        try:
            order = self._orders.order(job)
        except Exception as error:
            self._fail(job.id, error)
            return
        finished = self._orders.finished(order)
        if finished is not None:
            self._complete(job.id, finished)
            return
        clip = RunningClip(self._next_clip, job, order)
        self._running.add(clip)
        try:
            handle = pipeline.submit(order.request, [order.metadata])
        except Exception as error:
            if pipeline.run_error is not None or isinstance(error, ClosedError):
                raise
            self._fail(job.id, error)
            self._running.remove(job.id)
            return
        assert handle.clip == clip.clip, "only the engine submits clips"
        self._next_clip += 1
        clip.handle = handle
        handle.add_progress_callback(lambda _: self._running.moved(job.id))
        handle.add_done_callback(functools.partial(self._note, pipeline, job.id))
        self._announcer.changed(job.id)

    def _pass_on_cancels(self) -> None:
        with self._changed:
            asked, self._to_cancel = self._to_cancel, set()
        for job_id in asked:
            clip = self._running.get(job_id)
            if clip is not None and clip.handle is not None:
                clip.handle.cancel()

    def _note(self, pipeline: Pipeline, job_id: str, handle: Any) -> None:
        """Called in the pipeline's thread."""
        assert isinstance(handle, ClipHandle)
        self._running.settle(job_id, handle, run_has_ended=pipeline.run_error is not None)

    def settle_all(self) -> None:
        """Records the outcomes of the clips that have left the pipeline."""
        while (outcome := self._running.next_outcome()) is not None:
            if outcome.kind != "ended":
                self._settle(outcome)
                self._running.remove(outcome.job_id)
            self._running.forget_outcome()

    def _settle(self, outcome: Outcome) -> None:
        job_id, error = outcome.job_id, outcome.error
        clip = self._running.get(job_id)
        assert clip is not None
        if outcome.kind == "completed":
            self._complete(job_id, outcome.metadata)
            self.num_completed += 1
        elif outcome.kind == "cancelled":
            self._persist(lambda: self._store.cancelled(job_id))
            self._orders.forget(clip.job)
            self._announcer.changed(job_id)
        elif isinstance(error, InputError) and clip.order.request.done_steps:
            # Perhaps its latent checkpoint does not fit: without it the clip starts again.
            logger.warning("{} starts again: {}", job_id, error)
            self._orders.forget(clip.job)
            self._put_back(job_id, counts=False)
        else:
            assert error is not None
            self._fail(job_id, error)
            self._orders.forget(clip.job)

    def _complete(self, job_id: str, metadata: Mapping[str, Any]) -> None:
        self._persist(lambda: self._store.complete(job_id, dict(metadata)))
        self._announcer.changed(job_id)

    def _fail(self, job_id: str, error: BaseException) -> None:
        logger.warning("{} failed: {}", job_id, error)
        self._persist(lambda: self._store.fail(job_id, error))
        self._announcer.changed(job_id)

    def _put_back(self, job_id: str, *, counts: bool) -> None:
        self._persist(lambda: self._store.put_back(job_id, counts=counts))
        self._announcer.changed(job_id)
        self._is_queue_empty = False

    def put_back_all(self, error: BaseException, blamed: set[str]) -> None:
        """Puts the clips of ended ranks back into the queue; the `blamed` jobs count an attempt."""
        for clip in self._running.all():
            job = self._store.get(clip.job.id)
            counts = clip.job.id in blamed and job is not None and not job.cancel_asked
            if counts and job is not None and job.attempts + 1 >= MAX_ATTEMPTS:
                self._fail(job.id, _died_again(error))
                self._orders.forget(clip.job)
            else:
                self._put_back(clip.job.id, counts=counts)
            self._running.remove(clip.job.id)
        for left in self._store.running():  # taken, but not yet given to the ranks
            self._put_back(left.id, counts=False)

    def _persist(self, change: Callable[[], _T]) -> _T:
        """Makes a change of the queue, however long the disk is full."""
        while True:
            try:
                return change()
            except OutputError as error:
                if self._seconds_left() <= 0:
                    raise
                logger.error("the queue cannot be written, trying again: {}", error)
                with self._changed:
                    self._changed.wait(min(_DISK_SECONDS, self._seconds_left()))


def _died_again(error: BaseException) -> RankError:
    details = error.details if isinstance(error, SvdppError) else {}
    return RankError(
        f"the ranks died {MAX_ATTEMPTS} times during this clip; the last time: {error}",
        getattr(error, "hint", ""),
        details=details,
    )
