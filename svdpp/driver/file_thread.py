"""Thread for file operations, so that a folder that does not respond blocks no other thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future


class FileThread:
    """Daemon thread that makes submitted calls one after the other, and starts with the first one.

    A file operation on a network folder whose server is down returns when the server is back, or
    never. The thread that supervises the ranks must not block, so it submits its file operations.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], Future[None]]] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._starting = threading.Lock()

    def submit(self, call: Callable[[], object]) -> Future[None]:
        """Queue a call and return its future at once. The future gets the error of the call."""
        future: Future[None] = Future()
        self._calls.put((call, future))
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()
        return future

    def _run(self) -> None:
        while True:
            call, future = self._calls.get()
            try:
                call()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)
