"""Owns the ranks of one pipeline from entry to exit, and the thread that supervises them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from svdpp.driver.supervisor import Supervisor
from svdpp.errors import ClosedError, Interrupted, SvdppError, reraisable

# A dropped session ends within one poll. Only an observer that blocks keeps its thread for longer.
_DROP_SECONDS = 5.0


class RankSession:
    """Supervises ranks in a thread of its own until all work is done, a rank fails, or `drop`.

    The thread takes the ranks' events from the start to the end, so that ranks never wait for a
    reader. Any thread may call the methods.

    Args:
        supervisor: of ranks that have been started.
        timeout: seconds for the ranks to end after their last clip.
        is_idle: whether the ranks have no work left; asked by the thread after every poll.
        on_end: called with what ended the session, a failure or `ClosedError`; the first call
            counts.
        clean_up: called once, when no rank is left.
        is_launched: whether a launcher has started the ranks.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        timeout: float,
        is_idle: Callable[[], bool],
        on_end: Callable[[BaseException], None],
        clean_up: Callable[[], None],
        is_launched: bool,
    ) -> None:
        self._supervisor = supervisor
        self._timeout = timeout
        self._is_idle = is_idle
        self._on_end = on_end
        self._clean_up = clean_up
        self._is_launched = is_launched
        self._has_begun = threading.Event()
        self._has_ended = threading.Event()
        self._cleaning = threading.RLock()  # a signal's handler may close in the middle of a close
        self._is_closed = False
        self._dropped = ClosedError("the pipeline was closed before the clip was finished")
        self.is_closing = False
        """Whether no more work may be sent."""
        self.failure: BaseException | None = None
        """What ended the session, where it was neither the end of all work nor `drop`."""
        # A daemon: a program that never leaves the block still ends, and its ranks with it.
        self.thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        """Starts the thread and waits until all ranks are ready for work.

        Raises:
            SvdppError: one of them cannot get ready.
            ClosedError: another thread has dropped the session.
        """
        self.thread.start()
        self._has_begun.wait()
        if self.failure is not None:
            raise reraisable(self.failure)
        if self._has_ended.is_set():
            raise ClosedError("the pipeline was closed while its ranks started")

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Ends the session if an exception, such as a signal's, leaves the block.

        For the block that gives work to the ranks: those that have it would wait for the others.
        """
        try:
            yield
        except BaseException as error:
            reason = f"clips were given to some of the ranks only: {type(error).__name__}"
            self._supervisor.abort(SvdppError(reason))
            raise

    def close(self) -> None:
        """Waits until all work is done and the ranks have ended; `is_closing` was set before.

        Raises:
            SvdppError: what ended the session instead; not where it has been closed before.
        """
        if self._is_closed:
            return
        self._has_ended.wait()
        self._finish(self.failure)
        if self.failure is not None:
            raise reraisable(self.failure)

    def drop(self, error: BaseException | None) -> BaseException | None:
        """Ends the ranks at once, whatever they are doing.

        In the session's own thread, that is in an observer or a callback, it returns before that.

        Args:
            error: the reason, for ranks on other hosts; None: the caller needs no more results.

        Returns:
            What had ended the session instead; None where it has been closed before.
        """
        self.is_closing = True
        self._supervisor.abort(self._dropped)
        if threading.current_thread() is self.thread or self._is_closed:
            return None
        if not self._has_ended.wait(_DROP_SECONDS):
            self._end(self._dropped)  # an observer blocks the thread: nobody waits for it
        failure = self.failure
        if failure is None and self._is_launched and isinstance(error, Interrupted):
            failure = self._cause_of_signal()
        self._finish(failure or error)
        return failure

    def _cause_of_signal(self) -> BaseException | None:
        """What ended another rank, where a launcher has then sent this one a signal."""
        try:
            self._supervisor.explain()
        except SvdppError as cause:
            return cause
        return None

    def _run(self) -> None:
        reason = self._supervise()
        try:
            # Of a launcher's ranks `drop` still asks whether one of them has ended by itself.
            if self.failure is not None or (reason is self._dropped and not self._is_launched):
                self._supervisor.kill(self.failure)
        finally:
            self._end(reason)

    def _supervise(self) -> BaseException:
        """Supervises the ranks to their end; what ended them."""
        try:
            self._supervisor.wait_joined()
            self._has_begun.set()
            while not (self.is_closing and self._is_idle()):
                self._supervisor.step()
            self._supervisor.stop(self._timeout)
        except BaseException as error:
            if error is not self._dropped:
                self.failure = error
            return error
        return ClosedError("the pipeline is closed: its ranks have ended")

    def _end(self, reason: BaseException) -> None:
        self._on_end(reason)
        self._has_ended.set()
        self._has_begun.set()

    def _finish(self, reason: BaseException | None) -> None:
        with self._cleaning:
            if self._is_closed:
                return
            self._supervisor.kill(reason)
            self._is_closed = True
            self._clean_up()
