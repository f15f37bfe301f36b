"""Threads of the service that do the same again and again, also after a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable

from loguru import logger

from svdpp.errors import ClosedError, SvdppError
from svdpp.serve.sqlite import BackendUnavailableError

# After a failure a thread leaves alone for so long what it does.
_RETRY_SECONDS = 1.0


class Background:
    """Thread that calls `turn` again and again: `seconds` after its end, or at once after `wake`.

    The first of several turns that fail is logged as `failure`, unless queue or store are away.
    When it is closed, it calls `last` instead, once; it also ends if the queue is closed.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], object],
        seconds: float,
        *,
        failure: str,
        last: Callable[[], object] = lambda: None,
    ) -> None:
        self._turn = turn
        self._last = last
        self._seconds = seconds
        self._failure = failure
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._is_woken = threading.Event()
        self.is_closing = False
        """Whether the turn should end soon."""

    def start(self) -> None:
        """Begin the first turn."""
        self._thread.start()

    def wake(self) -> None:
        """Begin the next turn at once."""
        self._is_woken.set()

    def close(self, timeout: float | None = None) -> None:
        """End the thread, if it was started, and wait for its turn; seconds, None: without end."""
        self.is_closing = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        seconds = 0.0
        is_failing = is_over = False
        while not is_over:
            self._is_woken.wait(seconds)
            self._is_woken.clear()
            is_over = self.is_closing  # after the clearing, else `close` could go unnoticed
            seconds = max(self._seconds, _RETRY_SECONDS)
            try:
                (self._last if is_over else self._turn)()
                seconds, is_failing = self._seconds, False
            except ClosedError:
                return
            except BackendUnavailableError:  # is logged where it is noticed
                pass
            except Exception as error:
                if not is_failing:
                    is_mistake = not isinstance(error, SvdppError)
                    logger.opt(exception=is_mistake).error("{}: {}", self._failure, error)
                is_failing = True
