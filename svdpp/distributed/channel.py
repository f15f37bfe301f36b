"""Owns the messages between a rank and the parent: bytes up, bytes down, never a latent."""

from __future__ import annotations

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
