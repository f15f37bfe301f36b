"""`FileThread`: thread for file operations, which an unresponsive folder may block."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future


class FileThread:
    """Daemon thread, started by the first `submit`, that runs file operations in order.

    A file operation on a network folder blocks while the file server is down, possibly forever. The
    thread that supervises the ranks must not block, so it submits its file operations to this
    thread.

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
        """Queue a file operation, and return a future that is done when the operation has ended.

        The future holds the exception that the call raised, or None; the call's result is dropped.
        """
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
