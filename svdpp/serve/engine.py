"""Thread that runs queued jobs on the ranks, and restarts dead ranks; monitor of the ranks."""

from __future__ import annotations

import math
import multiprocessing
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from loguru import logger

from svdpp.config import PipelineConfig
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import resolve_config
from svdpp.driver.supervisor import Observer
from svdpp.errors import SvdppError, reraisable
from svdpp.launch.world import find_world
from svdpp.plan.actions import Action, Kind
from svdpp.serve.clips import RequestBuilder
from svdpp.serve.dispatcher import Dispatcher
from svdpp.serve.job import EngineState, Job
from svdpp.serve.queue import JobQueue
from svdpp.worker.messages import ActionDone, Event, Failed, Heartbeat, Joined, RankStats, StepDone

# Limits on `RankSpan`s, the time spans of ranks' actions: maximum age in seconds on the web page,
# and maximum number in memory.
_SPAN_SECONDS = 60.0
_MAX_SPANS = 1024
_SHOWN_KINDS = (Kind.ENCODE, Kind.DENOISE, Kind.DECODE)
_POLL_SECONDS = 0.25
# Seconds before the first restart of the ranks, and maximum seconds before a later one. The time
# doubles with each restart; a completed clip sets it back to the first value.
_MIN_BACK_OFF, _MAX_BACK_OFF = 1.0, 60.0
# Seconds after the grace period within which the ranks and the engine thread must end. Ranks that
# still run after this time are killed.
_END_SECONDS = 30.0


class Engine:
    """Thread that makes the queued clips on ranks, and restarts the ranks after one has died.

    A rank that dies ends the pipeline. The unfinished clips go back to the queue, and continue from
    their latent checkpoints in the next pipeline. The death counts as a failed attempt of the clip
    that the rank worked on. After a second failed attempt, the clip fails. Any thread may call any
    method.

    Args:
        config: Configuration of the pipeline; the engine resolves it.
        queue: Queue of the jobs.
        on_changed: Function that is called with a job after each change of the job's state.
    """

    def __init__(
        self,
        config: PipelineConfig,
        queue: JobQueue,
        *,
        on_changed: Callable[[Job], None] = lambda _: None,
    ) -> None:
        world = find_world()
        self._is_launched = world is not None
        self.config, self.checkpoint = resolve_config(config, world=world)
        self.state: EngineState = "starting"
        self.restarts = 0
        """Number of times that the ranks have been restarted."""
        self.fatal: BaseException | None = None
        """Error that ended the engine for good, such as the death of a rank that torchrun started;
        None while the engine runs."""
        self._queue = queue
        self.request_builder = RequestBuilder(self.config, self.checkpoint, queue.store)
        self._changed = threading.Condition()
        self.dispatcher = Dispatcher(
            self.config, queue, self.request_builder, on_changed, self._changed, self._seconds_left
        )
        self.rank_monitor = RankMonitor(config.world_size, self.dispatcher.job_id_of)
        """Current and recent actions of each rank."""
        self._observers: list[Observer] = [self.rank_monitor.add, self.dispatcher.image_ready]
        self._back_off = _MIN_BACK_OFF
        self._deadline = math.inf
        self._pipeline: Pipeline | None = None
        self._is_entering = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- methods for the server -----------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread, which starts the ranks."""
        self._thread.start()

    def close(self, grace_seconds: float) -> None:
        """Let the ranks finish their clips until a grace period is over; then end the ranks.

        Clips that are unfinished by then are dropped. Their jobs stay in progress in the queue,
        until `JobQueue.release` or `JobQueue.requeue_expired` requeues them.

        Args:
            grace_seconds: Length of the grace period in seconds.
        """
        with self._changed:
            self._deadline = min(self._deadline, time.monotonic() + grace_seconds)
            self.state = "closing"
            self._changed.notify_all()
        end = time.monotonic() + grace_seconds + _END_SECONDS
        while self._thread.is_alive() and time.monotonic() < end:
            if self._is_entering and (pipeline := self._pipeline) is not None:
                pipeline.close(drain=False)
            self._thread.join(_POLL_SECONDS)
        for rank in multiprocessing.active_children() if self._thread.is_alive() else ():
            rank.kill()  # the rank ignores SIGTERM, and Python would wait for it at exit

    def cancel(self, job_id: str, *, removes: bool = False) -> bool:
        """Cancel a job: at once if it is queued; otherwise ask the ranks to drop its clip.

        Args:
            job_id: Id of the job.
            removes: Whether a job in progress is also hidden from its owner at once, and removed
                when it has ended.

        Returns:
            Whether the job has ended or does not exist. False: the ranks still have to drop the
            clip.

        Raises:
            OutputError: The queue cannot be changed.
        """
        while not self._queue.request_cancel(job_id, removes=removes):
            if self._queue.cancel_waiting(job_id):
                job = self.dispatcher.notify_changed(job_id)
                if job is not None and self._queue.model_key in (None, job.model_key):
                    self.request_builder.remove_latents(job)
                self.dispatcher.wake()
                return True
            job = self._queue.get(job_id)
            if job is None or job.state.is_final:
                return True
            # Neither call above succeeded, but the job has not ended: its state changed between the
            # calls. So the loop tries both again.
        self.dispatcher.request_cancel(job_id)
        return False

    @property
    def is_idle(self) -> bool:
        """Whether the ranks are ready, and neither the ranks nor the queue have a job."""
        return self.state == "ready" and self.dispatcher.is_empty

    def observe(self, observer: Observer) -> None:
        """Add an observer of the ranks' events. Call this before `start`.

        Exceptions of the observer are logged.
        """
        self._observers.append(observer)

    def name_of(self, clip: int) -> str:
        """Return the id of the job whose clip has index `clip`; `clip N` if the clip is unknown."""
        return self.dispatcher.job_id_of(clip) or f"clip {clip}"

    # --- one pipeline after another, in the engine thread ----------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing():
                try:
                    self._run_pipeline()
                except Exception as error:
                    if not self._is_closing():
                        self._prepare_restart(error)
        except Exception as error:
            self.fatal = error
            logger.opt(exception=error).error("the engine ended: {}", error)

    def _prepare_restart(self, error: Exception) -> None:
        """Requeue the unfinished jobs after an error has ended the ranks; wait before the restart.

        After the wait, `_run` starts the ranks again. With each restart, the wait doubles, up to
        `_MAX_BACK_OFF` seconds. A finished clip resets the wait to `_MIN_BACK_OFF` seconds.

        Args:
            error: Error that has ended the ranks.

        Raises:
            Exception: `error`, if a launcher such as torchrun started the ranks and has to restart
                them.
        """
        self._set_state("restarting")
        self.dispatcher.requeue_all(error, self._find_blamed(error))
        if self._is_launched:
            raise error
        self.rank_monitor.reset()
        self.restarts += 1
        seconds, self._back_off = self._back_off, min(2 * self._back_off, _MAX_BACK_OFF)
        reason = re.sub(r"\bclip (\d+)", lambda found: self.name_of(int(found[1])), str(error))
        logger.error("the ranks ended, and start again in {:g} s: {}", seconds, reason)
        with self._changed:
            self._changed.wait_for(self._is_closing, seconds)

    def _run_pipeline(self) -> None:
        # A server does not use the pipeline's trace, so the pipeline keeps the events of one clip
        # only.
        pipeline = Pipeline(
            self.config,
            latents_folder=str(self.request_builder.latents_folder),
            history_clips=1,
            ranks_ignore_signals=True,
        )
        pipeline.observe(self._notify_observers)
        self.dispatcher.reset()
        self._pipeline, self._is_entering = pipeline, True
        try:
            with pipeline:
                self._is_entering = False
                self._set_state("ready")
                self._dispatch_until_closed(pipeline)
                # Clips that still run after the grace period are dropped.
                pipeline.close(drain=not self.dispatcher.clips())
        finally:
            self._pipeline, self._is_entering = None, False
            self.dispatcher.record_results()

    def _dispatch_until_closed(self, pipeline: Pipeline) -> None:
        num_completed = self.dispatcher.num_completed
        while not self._is_closing() or (self.dispatcher.clips() and self._seconds_left() > 0):
            if pipeline.run_error is not None:
                raise reraisable(pipeline.run_error)
            self.dispatcher.run_once(pipeline)
            if self.dispatcher.num_completed > num_completed:
                self._back_off = _MIN_BACK_OFF
            timeout = max(0.0, min(_POLL_SECONDS, self._seconds_left()))
            with self._changed:
                self._changed.wait_for(lambda: self.dispatcher.has_work, timeout)

    def _notify_observers(self, rank: int, event: Event) -> None:
        """Pass an event of a rank to all observers. The pipeline's thread calls this."""
        for observer in self._observers:
            try:
                observer(rank, event)
            except Exception:
                logger.exception("an observer failed")

    def _find_blamed(self, error: BaseException) -> set[str]:
        """Return the ids of the jobs to blame for a rank's death: usually the rank's last job.

        If this job is unknown, all jobs that ranks have begun are blamed.
        """
        rank = error.details.get("rank") if isinstance(error, SvdppError) else None
        job_id = (
            None if rank is None else self.dispatcher.job_id_of(self.rank_monitor.clip_of(rank))
        )
        begun = {clip.job.id: clip.has_started for clip in self.dispatcher.clips()}
        return {job_id} if job_id in begun else {id for id, has_begun in begun.items() if has_begun}

    def _is_closing(self) -> bool:
        return self._deadline < math.inf

    def _seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def _set_state(self, state: EngineState) -> None:
        with self._changed:
            if not self._is_closing():
                self.state = state


# --- monitor of the ranks -------------------------------------------------------------------------


@dataclass(frozen=True)
class RankSnapshot:
    """Current action of a rank, and the latest sample of the rank's memory and load."""

    rank: int
    device: str
    """Device of the rank, such as `cuda:0`; empty until the rank has started."""
    video: str | None
    """Id of the job that the action is for; None between two actions, or if the job is unknown."""
    action: str
    """Kind of the rank's current action, in lower case; empty between two actions."""
    step: int | None
    """Index of the denoising step in progress; None while the rank does not denoise."""
    doing: Literal["compute", "wait", "idle"]
    stats: dict[str, float | int | None] | None = None
    """Latest sample of the rank's memory, load, power and transferred bytes: values of `RankStats`
    by field name. None before the first sample."""


@dataclass(frozen=True, slots=True)
class RankSpan:
    """Time span in which a rank ran an action. Times are unix seconds."""

    rank: int
    video: str | None
    """Id of the job that the action was for; None if the job is unknown."""
    kind: str
    """Kind of the action in lower case: `encode`, `denoise` or `decode`."""
    start: float
    end: float


@dataclass
class _RankState:
    device: str = ""
    # Seconds by which the rank's monotonic clock is ahead of this machine's.
    clock_ahead: float = 0.0
    action: Action | None = None
    step: int = -1
    waits: bool = False
    # Monotonic time of the last change of `action` or `waits`.
    since: float = 0.0
    stats: dict[str, float | int | None] | None = None


class RankMonitor:
    """Collector of the ranks' events. One thread calls `add`; any thread may read.

    Args:
        world_size: Number of ranks.
        job_id_of: Function that returns the id of the job of a clip, given the clip's index.
    """

    def __init__(self, world_size: int, job_id_of: Callable[[int], str | None]) -> None:
        self._job_id_of = job_id_of
        self._lock = threading.Lock()
        self._ranks = [_RankState() for _ in range(world_size)]
        self._spans: deque[RankSpan] = deque(maxlen=_MAX_SPANS)

    def reset(self) -> None:
        """Forget the present work of ranks that have ended; keep the spans of their past work."""
        with self._lock:
            self._ranks = [_RankState() for _ in self._ranks]

    def add(self, rank: int, event: Event) -> None:
        """Update a rank's current action, sample and spans from an event that the rank reported."""
        with self._lock:
            state = self._ranks[rank]
            match event:
                case Joined():
                    state.device, state.clock_ahead = event.device, event.clock_ahead
                case Failed() | Heartbeat():
                    waits = isinstance(event, Heartbeat) and event.waiting
                    if (event.action, waits) != (state.action, state.waits):
                        state.action, state.waits, state.since = (
                            event.action,
                            waits,
                            time.monotonic(),
                        )
                        state.step = -1
                    state.step = max(state.step, event.step)
                case RankStats():
                    state.stats = event.model_dump()
                case StepDone():
                    state.step = event.step + 1
                case ActionDone():
                    start, end = event.start - state.clock_ahead, event.end - state.clock_ahead
                    self._spans += self._span(rank, event.action, start, end)
                case _:
                    pass

    def _span(self, rank: int, action: Action, start: float, end: float) -> list[RankSpan]:
        """Return a rank's action as a list of one span; empty if the web page hides its kind.

        Args:
            rank: Rank that ran the action.
            action: The action.
            start: Monotonic time in seconds at which the action began.
            end: Monotonic time in seconds at which the action ended.
        """
        if action.kind not in _SHOWN_KINDS:
            return []
        ahead = time.time() - time.monotonic()
        job, kind = self._job_id_of(action.clip), action.kind.lower()
        return [RankSpan(rank, job, kind, start + ahead, end + ahead)]

    def clip_of(self, rank: int) -> int | None:
        """Return the index of the clip in a rank's last report; None: the report has no action."""
        with self._lock:
            action = self._ranks[rank].action if rank < len(self._ranks) else None
        return None if action is None else action.clip

    def snapshot(self) -> list[RankSnapshot]:
        """Return the current action and the latest sample of each rank."""
        with self._lock:
            return [self._snapshot(rank, state) for rank, state in enumerate(self._ranks)]

    def _snapshot(self, rank: int, state: _RankState) -> RankSnapshot:
        if state.action is None:
            return RankSnapshot(rank, state.device, None, "", None, "idle", state.stats)
        step = state.step if state.action.kind is Kind.DENOISE and state.step >= 0 else None
        job, kind = self._job_id_of(state.action.clip), state.action.kind.lower()
        doing: Literal["wait", "compute"] = "wait" if state.waits else "compute"
        return RankSnapshot(rank, state.device, job, kind, step, doing, state.stats)

    def spans(self) -> list[RankSpan]:
        """Return the ranks' actions of the last 60 seconds and those in progress, as time spans."""
        oldest, now = time.time() - _SPAN_SECONDS, time.monotonic()
        with self._lock:
            spans = [span for span in self._spans if span.end >= oldest]
            for rank, state in enumerate(self._ranks):
                if state.action is not None and not state.waits:
                    spans += self._span(rank, state.action, state.since, now)
        return spans
