"""The ranks of one pipeline from entry to exit, and the thread that supervises them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from svdpp.driver.clips import OpenClips
from svdpp.driver.supervisor import Supervisor
from svdpp.errors import ClosedError, Interrupted, SvdppError, reraisable

# A dropped session ends within one poll, unless an observer blocks its thread.
_DROP_SECONDS = 5.0


class RankSession:
    """Supervises ranks in a thread until all work is done, a rank fails, or `drop` is called.

    The thread takes the ranks' events from start to end, so that ranks never wait for a reader.
    Any thread may call the methods.

    `clips` are the session's work: the ranks end when they are closing and all clips are settled.
    """

    def __init__(self, supervisor: Supervisor, clips: OpenClips, *, is_launched: bool) -> None:
        self._supervisor = supervisor
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
        clips.finished_by(self.thread)

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
            self._supervisor.abort(SvdppError(reason))
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
        self._supervisor.abort(self._dropped)
        if threading.current_thread() is self.thread or self._is_closed:
            return None
        if not self._has_ended.wait(_DROP_SECONDS):
            self._end(self._dropped)  # an observer blocks the thread: do not wait for it
        failure = self.failure
        if self._is_launched and isinstance(error, Interrupted):
            if failure is None:
                failure = self._cause_of_signal()
            elif failure is self._supervisor.interruption:
                failure = None  # the signal went to all ranks, and another's report came first
        self._finish(failure or error)
        return failure

    def _cause_of_signal(self) -> BaseException | None:
        """What ended another rank, if a launcher has then signalled this one."""
        try:
            self._supervisor.explain()
        except SvdppError as cause:
            return cause
        return None

    def _run(self) -> None:
        reason = self._supervise()
        try:
            # With launched ranks, `drop` still has to find out whether one of them has failed.
            if self.failure is not None or (reason is self._dropped and not self._is_launched):
                self._supervisor.kill(self.failure)
        finally:
            self._end(reason)

    def _supervise(self) -> BaseException:
        try:
            is_over = lambda: self.is_closing and self._clips.is_idle  # noqa: E731
            self._supervisor.supervise(is_over, self._has_begun.set)
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
            self._supervisor.kill(reason)
            self._is_closed = True
            self._clips.clean_up()
