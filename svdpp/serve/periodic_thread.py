"""Background threads that repeat a task, also after a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable

from loguru import logger

from svdpp.errors import ClosedError, SvdppError
from svdpp.serve.sqlite import BackendUnavailableError

# After a failure a thread leaves alone for so long what it does.
_RETRY_SECONDS = 1.0


class PeriodicThread:
    """Thread that calls `run` every `interval_seconds`, or at once after `wake`.

    The first of several calls that fail is logged as `error_message`, unless queue or store are
    unavailable. On `close` it calls `on_close` once; it also ends if the queue is closed.
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
        """Whether the turn should end soon."""

    def start(self) -> None:
        """Begin the first turn."""
        self._worker.start()

    def wake(self) -> None:
        """Begin the next turn at once."""
        self._is_woken.set()

    def close(self, timeout: float | None = None) -> None:
        """End the thread, if it was started, and wait for its turn; seconds, None: without end."""
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
            is_last = self.is_closing  # after the clearing, else `close` could go unnoticed
            delay = max(self._interval_seconds, _RETRY_SECONDS)
            try:
                (self._on_close if is_last else self._run_once)()
                delay, is_failing = self._interval_seconds, False
            except ClosedError:
                return
            except BackendUnavailableError:  # is logged where it is noticed
                pass
            except Exception as error:
                if not is_failing:
                    is_bug = not isinstance(error, SvdppError)
                    logger.opt(exception=is_bug).error("{}: {}", self._error_message, error)
                is_failing = True
