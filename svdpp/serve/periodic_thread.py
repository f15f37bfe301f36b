"""Background thread that repeats a task, and continues after failures."""

from __future__ import annotations

import threading
from collections.abc import Callable

from loguru import logger

from svdpp.errors import ClosedError, SvdppError
from svdpp.serve.sqlite import BackendUnavailableError

# Minimum seconds between a failed call of `run` and the next call, unless `wake` is called.
_RETRY_SECONDS = 1.0


class PeriodicThread:
    """Background thread that calls `run` every `interval_seconds`, or at once after `wake`.

    After `close`, the thread calls `on_close` once and ends. It also ends if `run` raises
    ClosedError, which means that the job queue has been closed. After any other error of `run`, the
    thread continues. If `run` fails several times in a row, only the first failure is logged.
    BackendUnavailableError is not logged here, because the dispatcher, the fleet and the store log
    it themselves.

    Args:
        name: Name of the thread.
        run: Function that the thread calls repeatedly.
        interval_seconds: Seconds between the end of a call and the next call.
        error_message: Beginning of the log message after a failure.
        on_close: Function that the thread calls before it ends.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], object],
        interval_seconds: float,
        *,
        error_message: str,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        self._run_once = run
        self._on_close = on_close
        self._interval_seconds = interval_seconds
        self._error_message = error_message
        self._worker = threading.Thread(target=self._loop, name=name, daemon=True)
        self._is_woken = threading.Event()
        self.is_closing = False
        """Whether `close` was called, so that a long `run` should end soon."""

    def start(self) -> None:
        """Start the background thread, which calls `run` at once."""
        self._worker.start()

    def wake(self) -> None:
        """Make the background thread call `run` now; during a call, make it call `run` again."""
        self._is_woken.set()

    def close(self, timeout: float | None = None) -> None:
        """Make the background thread end, and wait until it has ended, if it was started.

        Args:
            timeout: Maximum seconds to wait; None: no limit.
        """
        self.is_closing = True
        self.wake()
        if self._worker.ident is not None:
            self._worker.join(timeout)

    def _loop(self) -> None:
        delay = 0.0
        is_failing = is_last = False
        while not is_last:
            self._is_woken.wait(delay)
            self._is_woken.clear()
            # `close` sets `is_closing`, then the event. So `is_closing` is read only after the
            # event was cleared; in the other order, a `close` in between would be missed.
            is_last = self.is_closing
            delay = max(self._interval_seconds, _RETRY_SECONDS)
            try:
                (self._on_close if is_last else self._run_once)()
                delay, is_failing = self._interval_seconds, False
            except ClosedError:
                return
            except BackendUnavailableError:
                pass  # the dispatcher, the fleet's thread or the store logs this error
            except Exception as error:
                if not is_failing:
                    is_bug = not isinstance(error, SvdppError)
                    logger.opt(exception=is_bug).error("{}: {}", self._error_message, error)
                is_failing = True
