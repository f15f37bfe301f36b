"""Owns the message channel between a rank and the parent: reports up, commands down, no latents."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from multiprocessing.connection import Connection
from typing import Protocol


class Channel(Protocol):
    """One end of the connection between a rank and the parent."""

    def send(self, message: bytes) -> None:
        """Sends a whole message. Several threads may call it."""
        ...

    def receive(self, timeout: float) -> bytes | None:
        """Returns the next message, or None after `timeout` seconds.

        Raises:
            EOFError: the other end is closed.
        """
        ...


class PipeChannel:
    """A channel over a pipe between processes of one machine, or over a socket between hosts."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """See `Channel`."""
        with self._lock:
            self.connection.send_bytes(message)

    def receive(self, timeout: float) -> bytes | None:
        """See `Channel`."""
        return self.connection.recv_bytes() if self.connection.poll(timeout) else None

    def close(self) -> None:
        """Closes the connection at once."""
        self.connection.close()


class QueuedChannel(PipeChannel):
    """The parent's end of a pipe; `send` queues the message for a thread and returns at once.

    A rank reads its pipe only between actions. A pipe holds a few hundred kilobytes, so a direct
    write could block the parent for as long as the rank is busy or stalled.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None

    def send(self, message: bytes) -> None:
        """See `Channel`. Does not raise if the rank has ended."""
        with self._lock:
            if self._sender is None:
                sender = threading.Thread(target=self._send_queued, name="sender", daemon=True)
                sender.start()
                self._sender = sender
        self._messages.put(message)

    def close(self) -> None:
        """See `PipeChannel.close`. Messages that are still queued are dropped."""
        if self.connection.closed:
            return
        self._messages.put(None)
        if self._sender is not None:
            descriptor = os.dup(self.connection.fileno())
            with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as own:
                own.shutdown(socket.SHUT_RDWR)  # unblocks a sender that waits for the rank to read
            self._sender.join()
        self.connection.close()

    def _send_queued(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._messages.get()) is not None:
                self.connection.send_bytes(message)
