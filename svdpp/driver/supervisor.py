"""The parent's supervision of the ranks: their events, why a run failed, their end."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

from svdpp.config import PipelineConfig
from svdpp.driver.clips import OpenClips
from svdpp.driver.stalls import Liveness
from svdpp.driver.trace import Trace
from svdpp.errors import (
    BrokenLinkError,
    ClosedError,
    Interrupted,
    RankError,
    SvdppError,
    error_from_dict,
    reraisable,
)
from svdpp.launch.group import GUARD, Group
from svdpp.plan.grid import draw_grid
from svdpp.plan.schedule import Schedule
from svdpp.worker.messages import Event, Failed, Stop, describe_position, parse

_POLL_SECONDS = 0.1
# After the first failure, time for the other ranks' reports: the cause often arrives later.
_REPORT_SECONDS = 0.5
_END_SECONDS = 30.0
# With the rank's name in front and the remark behind, a line has 80 columns.
_PICTURE_WIDTH = 44

#: Called with (rank, event) for every event of the ranks.
Observer = Callable[[int, Event], None]
#: Opens an observer for a block in which ranks perform a schedule, given a title and the schedule.
OpenObserver = Callable[[str, Schedule], AbstractContextManager[Observer]]


def no_observer(title: str, schedule: Schedule) -> AbstractContextManager[Observer]:  # noqa: ARG001
    """An `OpenObserver` whose observer ignores every event."""
    return nullcontext(lambda _rank, _event: None)


class Supervisor:
    """Reads the ranks' events, keeps their trace, and raises the error that ends a run.

    One thread uses it; `send` and `abort` may be called from any thread.
    """

    def __init__(
        self,
        group: Group,
        config: PipelineConfig,
        *observers: Observer,
        trace: Trace | None = None,
    ) -> None:
        self._group = group
        self._config = config
        self._liveness = Liveness(config, time.monotonic())
        self._observers = observers
        self._failures: dict[int, Failed] = {}
        self._aborted: BaseException | None = None
        self.interruption: SvdppError | None = None
        """What `step` raised for a rank that a signal ended, if no other failure was found."""
        self.trace = Trace(group.world_size) if trace is None else trace

    def send(self, rank: int, message: bytes) -> None:
        """Sends a message to `rank`, from any thread; does nothing if the rank has ended."""
        self._group.send(rank, message)

    def abort(self, error: BaseException) -> None:
        """Makes the current or next call of `step` raise `error`; from any thread."""
        self._aborted = error

    def supervise(
        self, is_over: Callable[[], bool], on_joined: Callable[[], None] = lambda: None
    ) -> None:
        """Supervises the ranks to their end, which begins after the poll when `is_over`.

        `on_joined` is called when every rank is ready for work.
        """
        while not self._liveness.all_joined:
            self.step()
        on_joined()
        while not is_over():
            self.step()
        self.stop()

    def step(self) -> None:
        """Takes the available events, after a short wait for the first one."""
        self._listen(_POLL_SECONDS)
        if self._aborted is not None:
            raise self._aborted
        if self._failures or self._ended_badly():
            self._raise_cause()
        self._raise_stall()

    def stop(self) -> None:
        """Ends the ranks in order: each reports that it is done, and exits with code 0."""
        self._send_stop()
        deadline = time.monotonic() + self._config.timeout_seconds
        while not self._liveness.all_finished:
            self.step()
            if time.monotonic() > deadline:
                raise RankError("ranks did not end after their last clip")
        # Only now: a rank that ends takes with it what NCCL has not delivered.
        self._send_stop()
        if not self._group.end(_END_SECONDS):
            raise RankError("ranks reported the end of their work, but did not exit with code 0")

    def _send_stop(self) -> None:
        for rank in range(self._group.world_size):
            self.send(rank, Stop().to_bytes())

    def kill(self, error: BaseException | None = None) -> None:
        """Ends every rank at once, and sends `error` to other hosts; harmless after `stop`."""
        self._group.kill(error)

    def late_cause(self) -> SvdppError | None:
        """Why a rank has ended, if one has: a launcher then signals all others."""
        self._collect_reports()
        return self._cause()

    def _listen(self, timeout: float) -> None:
        for rank, message in self._group.poll(timeout):
            event = parse(message)
            self._liveness.heard(rank, event, time.monotonic())
            self.trace(rank, event)
            if isinstance(event, Failed):
                self._failures.setdefault(rank, event)  # a later report is about a signal
            for observer in self._observers:
                observer(rank, event)

    def _collect_reports(self) -> None:
        deadline = time.monotonic() + _REPORT_SECONDS
        self._listen(0.05)  # even if this process was paused beyond the deadline
        while time.monotonic() < deadline:
            self._listen(0.05)

    def _raise_stall(self) -> None:
        stall = self._liveness.stall(time.monotonic())
        if stall is not None:
            reason, hint = stall.reason, stall.hint
            host = self._group.members[stall.rank].host
            if stall.silent and host != socket.gethostname():
                hint = f"check whether {host} or the network to it is down, or the rank stopped"
            raise self._rank_error(stall.rank, reason, hint, "stalled here")

    def _ended_badly(self) -> bool:
        exited = self._group.exited()
        if any(not self._liveness.is_finished(rank) for rank in exited):
            self._listen(0)  # a rank's last message may still be unread
        return any(code or not self._liveness.is_finished(rank) for rank, code in exited.items())

    def _raise_cause(self) -> None:
        self._collect_reports()
        if (cause := self._cause()) is not None:
            raise cause
        rank = next(rank for rank, event in self._failures.items() if _is_interrupt(event))
        interruption = self._failed(rank, error_from_dict(self._failures[rank].error))
        self.interruption = interruption
        raise interruption

    def _cause(self) -> SvdppError | None:
        """The failure that caused the others; None if only signals ended ranks.

        A broken link to a neighbour is the cause only if there is no other failure.
        """
        exited = self._group.exited()
        failed = {rank: error_from_dict(event.error) for rank, event in self._failures.items()}
        own = [
            rank
            for rank, error in failed.items()
            if not isinstance(error, BrokenLinkError) and not _is_interrupt(self._failures[rank])
        ]
        by_signal = [rank for rank, code in exited.items() if code is not None and code < 0]
        silent = [
            rank
            for rank, code in exited.items()
            if rank not in failed and (code or not self._liveness.is_finished(rank))
        ]
        if own:
            return self._failed(own[0], failed[own[0]])
        if by_signal or silent:
            rank = (by_signal or silent)[0]
            return self._died(rank, exited[rank])
        if any(map(_is_interrupt, self._failures.values())):
            return None
        return next((self._failed(rank, error) for rank, error in failed.items()), None)

    def _failed(self, rank: int, error: SvdppError) -> SvdppError:
        event = self._failures[rank]
        if type(error) is not SvdppError and not isinstance(error, RankError):
            error.details.setdefault("rank", rank)
            return error  # input, output, model or memory: its message is complete
        where = describe_position(event.action, event.step)
        return RankError(
            f"{self._name(rank)} failed{where}: {error.message}",
            error.hint or "--debug shows the traceback",
            picture=self._picture(rank, "failed here"),
            trace=event.traceback,
            details={"rank": rank, **error.details},
        )

    def _died(self, rank: int, code: int | None) -> RankError:
        if code is None:
            hint = f"see the launcher's output on {self._group.members[rank].host}"
            return self._rank_error(rank, "is gone", hint, "was lost here")
        if code >= 0:
            cause = f"ended with exit code {code} without a report"
            if self._group.output_tail(rank) is None:
                cause = f"could not import your script: {GUARD}"
            return self._rank_error(rank, cause, "", "died here")
        hint = ""
        if -code == signal.SIGKILL:
            hint = "the kernel kills processes when memory runs out: fewer ranks need less"
        cause = f"was killed by {signal.Signals(-code).name}"
        return self._rank_error(rank, cause, hint, "died here")

    def _rank_error(self, rank: int, cause: str, hint: str, remark: str) -> RankError:
        heartbeat = self._liveness.position(rank)
        return RankError(
            f"{self._name(rank)} {cause}{describe_position(heartbeat.action, heartbeat.step)}",
            hint,
            picture=self._picture(rank, remark),
            trace=self._group.output_tail(rank) or "",
            details={"rank": rank},
        )

    def _name(self, rank: int) -> str:
        member, planned = self._group.members[rank], self._config.device
        if planned == "cuda":
            planned = f"cuda:{member.local_rank}"
        device = self.trace.reported[rank].device or planned
        return f"rank {rank} ({device} of {member.host})"

    def _picture(self, rank: int, remark: str) -> str:
        if not self.trace.spans:
            return ""
        marks = {rank: f"rank {rank} {remark}"}
        world_size = self._group.world_size
        lines = draw_grid(self.trace.spans, world_size, width=_PICTURE_WIDTH, marks=marks)
        return "\n".join(lines)


def _is_interrupt(event: Failed) -> bool:
    """Whether a signal ended the rank, which is never the cause of other failures."""
    return bool(event.error["type"] == Interrupted.__name__)


# A dropped session ends within one poll, unless an observer blocks its thread.
_DROP_SECONDS = 5.0


class RankSession:
    """Supervises ranks in a thread until all work is done, a rank fails, or `drop` is called.

    The thread takes the ranks' events from start to end, so that ranks never wait for a reader.
    Any thread may call the methods.

    `clips` are the session's work: the ranks end when they are closing and all clips are settled.
    """

    def __init__(self, supervisor: Supervisor, clips: OpenClips, *, is_launched: bool) -> None:
        self.supervisor = supervisor
        self._clips = clips
        self._is_launched = is_launched
        self._has_begun = threading.Event()
        self._has_ended = threading.Event()
        self._cleaning = threading.RLock()  # a signal handler may close during a close
        self._is_closed = False
        self._dropped = ClosedError("the pipeline was closed before the clip was finished")
        self.is_closing = False
        """Whether no more work may be sent."""
        self.failure: BaseException | None = None
        """The error that ended the session; None if its work ended it, or `drop`."""
        # A daemon, so that a program that never leaves the block still ends, and its ranks too.
        self.thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        clips.finisher = self.thread

    def start(self) -> None:
        """Starts the thread and waits until all ranks are ready for work."""
        self.thread.start()
        self._has_begun.wait()
        if self.failure is not None:
            raise reraisable(self.failure)
        if self._has_ended.is_set():
            raise ClosedError("the pipeline was closed while its ranks started")

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Ends the session if an exception, such as a signal's, leaves the block.

        For the block that sends work to the ranks: ranks that got it would wait for the others.
        """
        try:
            yield
        except BaseException as error:
            reason = f"only some of the ranks got the clips: {type(error).__name__}"
            self.supervisor.abort(SvdppError(reason))
            raise

    def close(self) -> None:
        """Waits until all work is done and the ranks have ended; set `is_closing` first."""
        if self._is_closed:
            return
        self._has_ended.wait()
        self._finish(self.failure)
        if self.failure is not None:
            raise reraisable(self.failure)

    def drop(self, error: BaseException | None) -> BaseException | None:
        """Ends the ranks at once, whatever they are doing.

        In the session's thread, that is in an observer or a callback, it returns before they end.

        `error` is the reason, for ranks on other hosts; None: the caller needs no more results.
        Returns what had already ended the session; None if it is closed already.
        """
        self.is_closing = True
        self.supervisor.abort(self._dropped)
        if threading.current_thread() is self.thread or self._is_closed:
            return None
        if not self._has_ended.wait(_DROP_SECONDS):
            self._end(self._dropped)  # an observer blocks the thread: do not wait for it
        failure = self.failure
        if self._is_launched and isinstance(error, Interrupted):
            if failure is None:
                failure = self.supervisor.late_cause()
            elif failure is self.supervisor.interruption:
                failure = None  # the signal went to all ranks, and another's report came first
        self._finish(failure or error)
        return failure

    def _run(self) -> None:
        reason = self._supervise()
        try:
            # With launched ranks, `drop` still has to find out whether one of them has failed.
            if self.failure is not None or (reason is self._dropped and not self._is_launched):
                self.supervisor.kill(self.failure)
        finally:
            self._end(reason)

    def _supervise(self) -> BaseException:
        try:
            is_over = lambda: self.is_closing and self._clips.is_idle  # noqa: E731
            self.supervisor.supervise(is_over, self._has_begun.set)
        except BaseException as error:
            if error is not self._dropped:
                self.failure = error
            return error
        return ClosedError("the pipeline is closed: its ranks have ended")

    def _end(self, reason: BaseException) -> None:
        self._clips.end(reason)
        self._has_ended.set()
        self._has_begun.set()

    def _finish(self, reason: BaseException | None) -> None:
        with self._cleaning:
            if self._is_closed:
                return
            self.supervisor.kill(reason)
            self._is_closed = True
            self._clips.clean_up()
