"""`Supervisor` of the ranks: reads events, detects stalls, and finds the causes of failures."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from svdpp.config import PipelineConfig
from svdpp.driver.trace import Trace
from svdpp.errors import (
    BrokenLinkError,
    Interrupted,
    MismatchError,
    RankError,
    SvdppError,
    error_from_dict,
)
from svdpp.launch.start_deadline import LIMIT_HINT, NO_FURTHER_THREAD, names_limit
from svdpp.launch.worker_group import MAIN_GUARD_HINT, WorkerGroup
from svdpp.plan.actions import Action, Schedule
from svdpp.plan.forecast import draw_grid
from svdpp.worker.messages import (
    Event,
    Failed,
    Finished,
    Heartbeat,
    Joined,
    RankStats,
    StepDone,
    Stop,
    describe_position,
    parse,
)

_POLL_SECONDS = 0.1
# Seconds to wait for the reports of other ranks after the first failure, because the report of the
# rank that caused the failure often arrives later.
_REPORT_SECONDS = 0.5
_END_SECONDS = 30.0
# Width, in columns, of the grid of ranks and steps in error messages. With the label of the rank
# and a remark such as `rank 3 died here`, a line has about 80 columns.
_GRID_WIDTH = 44
# Exit code that Python reports for a process, instead of the real one, if the process's fork server
# has ended.
_LOST_CODE = 255
_NO_MEMORY = "the kernel kills processes when memory runs out: fewer ranks need less memory"

#: Function that is called with the rank and the event, for every event of the ranks.
Observer = Callable[[int, Event], None]
#: Function that gets a title and a schedule, and returns a context manager. The context manager
#: yields an observer of the ranks that execute the schedule.
OpenObserver = Callable[[str, Schedule], AbstractContextManager[Observer]]


def no_observer(title: str, schedule: Schedule) -> AbstractContextManager[Observer]:  # noqa: ARG001
    """Return a context manager that yields an observer which ignores all events of the ranks.

    Args:
        title: Title of the run, which is ignored.
        schedule: Schedule of the run, which is ignored.
    """
    return nullcontext(lambda _rank, _event: None)


class Supervisor:
    """Reader of the ranks' events. If the run has failed, the reader raises the cause as an error.

    Any thread may call `send` and `abort`. All other methods must be called by one thread.

    Args:
        group: Handles of the ranks.
        config: Resolved configuration.
        observers: Functions that get each event of the ranks.
        trace: Trace that keeps the measurements; None: a new trace.
        begun: Time on the monotonic clock from which `start_timeout_seconds` counts; None: now.
    """

    def __init__(
        self,
        group: WorkerGroup,
        config: PipelineConfig,
        *observers: Observer,
        trace: Trace | None = None,
        begun: float | None = None,
    ) -> None:
        self._group = group
        self._config = config
        self._stall_detector = StallDetector(config, time.monotonic(), begun)
        self._observers = observers
        self._failures: dict[int, Failed] = {}
        self._aborted: BaseException | None = None
        self.interruption: SvdppError | None = None
        """Error that `step` raised because a signal ended a rank and nothing else failed; None: no
        such error was raised."""
        self.trace = Trace(group.world_size) if trace is None else trace

    @property
    def rank_pids(self) -> list[int]:
        """Process ids of the ranks that this process has started, in the order of the ranks."""
        return self._group.pids

    def send(self, rank: int, message: bytes) -> None:
        """Send a message to a rank, from any thread; do nothing if the rank has ended."""
        self._group.send(rank, message)

    def send_to_all(self, message: bytes) -> None:
        """Send a message to every rank."""
        for rank in range(self._group.world_size):
            self.send(rank, message)

    def abort(self, error: BaseException) -> None:
        """End the supervision of the ranks: the current or next call of `step` raises `error`.

        Any thread may call this.
        """
        self._aborted = error

    def supervise(
        self, is_over: Callable[[], bool], on_joined: Callable[[], None] = lambda: None
    ) -> None:
        """Handle the ranks' events until all work is done, then end the ranks.

        Args:
            is_over: Function that returns whether all work is done.
            on_joined: Function that is called once, when all ranks are ready for work.

        Raises:
            SvdppError: A rank has failed, died or stalled.
        """
        while not self._stall_detector.all_joined:
            self.step()
        on_joined()
        while not is_over():
            self.step()
        self.stop()

    def step(self) -> None:
        """Handle all available events of the ranks; raise an error if a rank fails or stalls.

        For the first event, the call waits a short time.

        Raises:
            SvdppError: A rank has failed, died or stalled, or `abort` was called with this error.
        """
        self._read_events(_POLL_SECONDS)
        if self._aborted is not None:
            raise self._aborted
        if self._failures or self._has_failed_rank():
            cause = self.find_root_cause()
            if cause is None:
                rank = next(rank for rank, event in self._failures.items() if _is_interrupt(event))
                cause = self.interruption = self._failure_error(rank)
            raise cause
        if (stall := self._stall_detector.find_stall(time.monotonic())) is not None:
            raise self._rank_error(
                stall.rank, stall.reason, stall.hint, "stalled here", **stall.details
            )

    def stop(self) -> None:
        """End the ranks normally: each rank reports that it is done, and then exits with code 0.

        Raises:
            RankError: A rank does not report that it is done, or has another exit code.
        """
        self.send_to_all(Stop().to_bytes())
        deadline = time.monotonic() + self._config.timeout_seconds
        while not self._stall_detector.all_finished:
            self.step()
            if time.monotonic() > deadline:
                raise RankError(
                    "ranks did not end after their last clip",
                    details={"timeout_seconds": self._config.timeout_seconds},
                )
        # The first `Stop` tells the ranks to finish their work, this second one to exit. It is sent
        # only after all ranks have reported that they are done, because packets in the NCCL buffers
        # of a rank are lost when the rank exits.
        self.send_to_all(Stop().to_bytes())
        if not self._group.end(_END_SECONDS):
            raise RankError(
                "ranks reported the end of their work, but did not exit with code 0",
                details={"exit_codes": list(self._group.exited().values()), "expected": 0},
            )

    def kill(self, error: BaseException | None = None) -> None:
        """Kill every rank; do nothing to ranks that have ended.

        Args:
            error: Reason that is sent to ranks on other hosts; None: no error has ended the run.
        """
        self._group.kill(error)

    def find_root_cause(self) -> SvdppError | None:
        """Collect the ranks' reports for half a second, and return the error that ended the run.

        A broken link between two ranks counts as the cause only if there is no other failure.

        Returns:
            Error that ended the run; None if ranks report only that signals ended them.
        """
        deadline = time.monotonic() + _REPORT_SECONDS
        # The events are read at least once, even if this process was paused beyond the deadline.
        self._read_events(0.05)
        while time.monotonic() < deadline:
            self._read_events(0.05)
        exited, states = self._group.exited(), self._stall_detector.states
        signalled = [rank for rank, event in self._failures.items() if _is_interrupt(event)]
        others = [rank for rank in self._failures if rank not in signalled]
        root_causes = [
            rank for rank in others if not isinstance(self._error(rank), BrokenLinkError)
        ]
        killed = [rank for rank, code in exited.items() if code is not None and code < 0]
        silent = [
            rank
            for rank, code in exited.items()
            if rank not in self._failures and (code or not states[rank].finished)
        ]
        if root_causes:
            return self._failure_error(root_causes[0])
        if killed or silent:
            rank = (killed or silent)[0]
            return self._death_error(rank, exited[rank])
        return None if signalled or not others else self._failure_error(others[0])

    def _read_events(self, timeout: float) -> None:
        for rank, message in self._group.poll(timeout):
            event = parse(message)
            self._stall_detector.record(rank, event, time.monotonic())
            self.trace(rank, event)
            if isinstance(event, Failed):
                # only a rank's first report is kept, because later reports are consequences
                self._failures.setdefault(rank, event)
            for observer in self._observers:
                observer(rank, event)

    def _has_failed_rank(self) -> bool:
        exited, states = self._group.exited(), self._stall_detector.states
        if any(not states[rank].finished for rank in exited):
            self._read_events(0)  # the last message of a rank that has ended may still be unread
        return any(code or not states[rank].finished for rank, code in exited.items())

    def _error(self, rank: int) -> SvdppError:
        return error_from_dict(self._failures[rank].error)

    def _failure_error(self, rank: int) -> SvdppError:
        event, error = self._failures[rank], self._error(rank)
        if type(error) is not SvdppError and not isinstance(error, RankError):
            # Errors about input, output, model or memory are clear without the clip and the step.
            # So their messages stay as they are.
            error.details.setdefault("rank", rank)
            return error
        where = describe_position(event.action, event.step)
        if isinstance(error, MismatchError):
            return self._mismatch_error(rank, error, event)
        return RankError(
            f"{self._describe_rank(rank)} failed{where}: {error.message}",
            error.hint or "`debug` shows the traceback",
            grid=self._draw_grid(rank, "failed here"),
            trace=event.traceback,
            details={"rank": rank, **_position(event.action, event.step), **error.details},
        )

    def _mismatch_error(self, rank: int, error: MismatchError, event: Failed) -> RankError:
        """Return the error for a packet that a rank has rejected; it names the packet's sender.

        Args:
            rank: Rank that has rejected the packet.
            error: Error that the rank has reported.
            event: Report of the rank.
        """
        where = describe_position(event.action, event.step)
        sender = error.details.get("from_rank", rank)
        receiver = error.details.get("to_rank", rank)
        name = self._describe_rank(sender)
        return MismatchError(
            f"{name} sent rank {receiver} a wrong packet{where}: {error.message}",
            error.hint or "`debug` shows the traceback of the rank that refused it",
            grid=self._draw_grid(sender, "sent it"),
            trace=event.traceback,
            details={
                "rank": sender,
                **_position(event.action, event.step),
                **error.details,
            },
        )

    def _death_error(self, rank: int, code: int | None) -> RankError:
        if code is None:
            hint = f"see the launcher's output on {self._group.workers[rank].host}"
            return self._rank_error(rank, "is gone", hint, "was lost here")
        if code == _LOST_CODE and (end := self._group.fork_server_end()) is not None:
            cause = f"ended because its fork server {end}"
            return self._rank_error(rank, cause, _NO_MEMORY, "died here", exit_code=code)
        output = self._group.output_tail(rank)
        hint = LIMIT_HINT if names_limit(output or "") else ""
        if code >= 0:
            cause = f"ended with exit code {code} without a report"
            if output is None:
                cause = f"could not import your script: {MAIN_GUARD_HINT}"
            elif hint:
                cause = f"ended with exit code {code}: {NO_FURTHER_THREAD}"
            return self._rank_error(rank, cause, hint, "died here", exit_code=code)
        if -code == signal.SIGKILL:
            hint = _NO_MEMORY
        cause = f"was killed by {signal.Signals(-code).name}"
        return self._rank_error(rank, cause, hint, "died here", signal=-code)

    def _rank_error(
        self, rank: int, cause: str, hint: str, remark: str, **details: object
    ) -> RankError:
        heartbeat = self._stall_detector.states[rank].heartbeat
        where = describe_position(heartbeat.action, heartbeat.step)
        return RankError(
            f"{self._describe_rank(rank)} {cause}{where}",
            hint,
            grid=self._draw_grid(rank, remark),
            trace=self._group.output_tail(rank) or "",
            details={
                "rank": rank,
                **_position(heartbeat.action, heartbeat.step),
                **details,
            },
        )

    def _describe_rank(self, rank: int) -> str:
        worker, planned = self._group.workers[rank], self._config.device
        if planned == "cuda":
            planned = f"cuda:{worker.local_rank}"
        device = self.trace.rank_metrics[rank].device or planned
        return f"rank {rank} ({device} of {worker.host})"

    def _draw_grid(self, rank: int, remark: str) -> str:
        if not self.trace.spans:
            return ""
        marks, size = {rank: f"rank {rank} {remark}"}, self._group.world_size
        return "\n".join(draw_grid(self.trace.spans, size, width=_GRID_WIDTH, marks=marks))


def _position(action: Action | None, step: int) -> dict[str, object]:
    """Return a rank's position as fields for an error's `details`: clip, step and action."""
    if action is None:
        return {}
    return {"clip": action.clip, "action": str(action), **({"step": step} if step >= 0 else {})}


def _is_interrupt(event: Failed) -> bool:
    """Whether a rank reports that a signal ended it. Such a report never explains a failure."""
    return bool(event.error["type"] == Interrupted.__name__)


# --- detection of stalled ranks -----------------------------------------------------------------

# While a rank starts, the time without a heartbeat after which it counts as stalled is longer by
# this factor. A library may then hold the GIL for long, as CUDA's initialisation does with many
# GPUs, so that the rank's thread cannot send heartbeats.
_PATIENCE_AT_START = 8
# This process normally polls several times a second. If more than these seconds pass between two
# polls, this process itself was paused.
_PAUSE_SECONDS = 3.0
_SLOW_DISK_HINT = "raise `start_timeout_seconds` for a slow disk"
_LINK_HINT = (
    "on GPUs try NCCL_P2P_DISABLE=1, or try PIPELINE_BACKEND=gloo, or give a container a larger "
    "/dev/shm: docker run --shm-size=8g; between hosts check the firewall"
)


@dataclass
class RankState:
    """State of one rank, as known from its messages. Times are in seconds, on a monotonic clock."""

    last_message: float
    """Time of the rank's last message."""
    last_progress: float
    """Latest time at which the rank made progress or had nothing to do."""
    last_event: float
    """Time of the rank's last message that was not a heartbeat."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    started: bool = False
    joined: bool = False
    finished: bool = False


@dataclass(frozen=True)
class Stall:
    """Rank that is stalled, with the reason and a hint."""

    rank: int
    reason: str
    hint: str
    details: Mapping[str, object]
    """Numbers that the text `reason` contains, by name, such as `silent_seconds`."""


class StallDetector:
    """Detector of stalled ranks. Ranks that are slow or wait for other ranks are not stalled.

    A stall is one of these:
    - A rank has not joined (become ready for work) within `start_timeout_seconds`.
    - A rank has sent no heartbeat for `max_silence_seconds`, or, before it has joined, for eight
      times as long.
    - All ranks have joined, and a rank that waits for no other rank, or that still writes files,
      makes no progress for `timeout_seconds`.
    - All busy ranks wait for each other for `timeout_seconds`. The rank whose last progress is the
      oldest counts as stalled.

    `states` has an entry for each rank. All times are in seconds on the same clock.

    Args:
        config: Configuration with the timeouts.
        now: Current time.
        begun: Time from which `start_timeout_seconds` counts; None: `now`.
    """

    def __init__(self, config: PipelineConfig, now: float, begun: float | None = None) -> None:
        self._polled = now
        self._begun = now if begun is None else begun
        self._start_timeout = config.start_timeout_seconds
        self._heartbeat_timeout = max_silence_seconds(config)
        self._timeout = config.timeout_seconds
        self.states = [RankState(now, now, now) for _ in range(config.world_size)]

    def record(self, rank: int, event: Event, now: float) -> None:
        """Update a rank's state with an event that the rank has sent.

        Args:
            rank: Rank that sent the event.
            event: Any event.
            now: Current time on the detector's clock.
        """
        if isinstance(event, RankStats):
            # A separate thread of the rank sends `RankStats` even if the rank is stalled, so this
            # event does not show that the rank is working.
            return
        self._discount_pause(now)
        state = self.states[rank]
        state.started = True
        state.last_message = now
        if isinstance(event, Heartbeat):
            # A rank that is idle, or whose wait has just ended, counts as making progress, so that
            # it is not reported as stalled.
            is_idle = event.action is None and not event.writing
            if is_idle or (state.heartbeat.waiting and not event.waiting):
                state.last_progress = now
            state.heartbeat = event
            return
        state.last_progress = state.last_event = now
        if isinstance(event, StepDone) and state.heartbeat.action is not None:
            step = min(event.step + 1, state.heartbeat.action.end - 1)
            state.heartbeat = state.heartbeat.model_copy(update={"step": step})
        state.joined = state.joined or isinstance(event, Joined)
        state.finished = state.finished or isinstance(event, Finished)

    @property
    def all_joined(self) -> bool:
        """Whether every rank is ready for work."""
        return all(state.joined for state in self.states)

    @property
    def all_finished(self) -> bool:
        """Whether every rank has reported that its work is done."""
        return all(state.finished for state in self.states)

    def find_stall(self, now: float) -> Stall | None:
        """Return a stalled rank; None if no rank is stalled.

        Args:
            now: Current time on the detector's clock.
        """
        self._discount_pause(now)
        running = [rank for rank, state in enumerate(self.states) if not state.finished]
        for rank in running:
            state = self.states[rank]
            limit = self._heartbeat_timeout * (1 if state.joined else _PATIENCE_AT_START)
            if state.started and now - state.last_message > limit:
                reason = f"has sent no heartbeat for {now - state.last_message:.0f} s"
                hint = (
                    "check whether the rank's process is stopped, and whether its machine is out "
                    "of memory or unreachable"
                )
                numbers = {"silent_seconds": now - state.last_message, "limit_seconds": limit}
                return Stall(rank, reason, hint, numbers)
        if self.all_joined:
            return self._find_idle_rank(running, now)
        return self._find_late_rank(running) if now - self._begun > self._start_timeout else None

    def _find_late_rank(self, running: list[int]) -> Stall:
        """Return the rank that delays the start, preferably one that waits for no other rank."""
        phases = {
            rank: (
                state.joined,
                state.heartbeat.peer >= 0,
                state.heartbeat.waiting,
                state.started,
            )
            for rank, state in enumerate(self.states)
        }
        rank = min(running, key=phases.__getitem__)
        state, within = self.states[rank], f"within {self._start_timeout:.0f} s"
        phase = state.heartbeat.phase
        numbers: dict[str, object] = {"timeout_seconds": self._start_timeout}
        if not state.started:
            return Stall(rank, f"never started {within}", _SLOW_DISK_HINT, numbers)
        numbers["phase"] = phase
        if state.heartbeat.peer >= 0:
            numbers["peer"] = state.heartbeat.peer
            return Stall(rank, f"did not finish {phase} {within}", _LINK_HINT, numbers)
        doing = f" ({phase})" if phase else ""
        return Stall(rank, f"did not get ready {within}{doing}", _SLOW_DISK_HINT, numbers)

    def _discount_pause(self, now: float) -> None:
        """Add the seconds of a pause to all recorded times, so that no rank counts as stalled.

        Ctrl-Z pauses this process and the ranks; a suspended machine pauses all processes.
        """
        pause, self._polled = now - self._polled, now
        if pause > _PAUSE_SECONDS:
            self._begun += pause
            for state in self.states:
                state.last_message += pause
                state.last_progress += pause
                state.last_event += pause

    def _find_idle_rank(self, running: list[int], now: float) -> Stall | None:
        slow = [rank for rank in running if now - self.states[rank].last_progress > self._timeout]
        heartbeats = {rank: self.states[rank].heartbeat for rank in running}
        # If a rank waits, another rank is the cause. There are two exceptions: all busy ranks wait,
        # or the waiting rank still writes files.
        causes = [rank for rank in slow if heartbeats[rank].writing or not heartbeats[rank].waiting]
        if not causes and all(rank in slow for rank in running if heartbeats[rank].action):
            # A packet may have just arrived at a waiting rank, which has not reported this yet. So
            # the ranks count as stalled only after `timeout_seconds` without any event.
            last_event = max((self.states[rank].last_event for rank in running), default=now)
            causes = slow if now - last_event > self._timeout else []
        if not causes:
            return None
        rank = min(causes, key=lambda rank: self.states[rank].last_progress)
        last, seconds = heartbeats[rank], now - self.states[rank].last_progress
        waited = f"for {seconds:.0f} s"
        numbers = {"idle_seconds": seconds, "timeout_seconds": self._timeout}
        if last.writing and (last.waiting or last.action is None):
            hint = "check that the rank's output folder still responds"
            return Stall(rank, f"has waited for its disk {waited}", hint, numbers)
        hint = "raise `timeout_seconds` if a single step takes that long"
        return Stall(rank, f"has made no progress {waited}", hint, numbers)


def max_silence_seconds(config: PipelineConfig) -> float:
    """Return the seconds without a heartbeat after which a rank counts as stalled.

    The result is below `timeout_seconds`, so that a silent rank is reported before other ranks,
    which wait for it, exceed `timeout_seconds`.
    """
    return min(config.heartbeat_timeout_seconds, 0.8 * config.timeout_seconds)
