"""Owns the messages between a rank and the parent: bytes up, bytes down, never a latent."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from multiprocessing.connection import Connection
from typing import Protocol


class Channel(Protocol):
    """One end of the line between a rank and the parent."""

    def send(self, message: bytes) -> None:
        """Sends a whole message; safe from several threads."""
        ...

    def receive(self, timeout: float) -> bytes | None:
        """The next message, or None after `timeout` seconds; EOFError when the line is dead."""
        ...


class PipeChannel:
    """Over a pipe between processes of one machine, or a connection between hosts."""

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
        """Ends the line, at once."""
        self.connection.close()


class QueuedChannel(PipeChannel):
    """The parent's end of a pipe to a rank that reads only when it is done with what it has.

    A pipe holds some hundred kilobytes, and a rank may be busy, or frozen, for long: `send` never
    waits for it, a thread does.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None

    def send(self, message: bytes) -> None:
        """See `Channel`; a rank that is gone is no error here."""
        with self._lock:
            if self._sender is None:
                sender = threading.Thread(target=self._pass_on, name="sender", daemon=True)
                sender.start()
                self._sender = sender
        self._messages.put(message)

    def close(self) -> None:
        """See `PipeChannel.close`; what has not been sent by now is not sent."""
        if self.connection.closed:
            return
        self._messages.put(None)
        if self._sender is not None:
            descriptor = os.dup(self.connection.fileno())
            with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as own:
                own.shutdown(socket.SHUT_RDWR)  # wakes a sender that waits for the rank
            self._sender.join()
        self.connection.close()

    def _pass_on(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._messages.get()) is not None:
                self.connection.send_bytes(message)
