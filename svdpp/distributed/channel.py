"""Owns the messages between a rank and the parent: bytes up, bytes down, never a latent."""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import Connection
from typing import Protocol

import torch.distributed as dist

_STORE_POLL_SECONDS = 0.02


class Channel(Protocol):
    """One end of the line between a rank and the parent."""

    def send(self, message: bytes) -> None:
        """Sends a whole message; safe from several threads."""
        ...

    def receive(self, timeout: float) -> bytes | None:
        """The next message, or None after `timeout` seconds; EOFError when the line is dead."""
        ...


class PipeChannel:
    """Over a pipe, between processes of one machine."""

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


class StoreChannel:
    """Over torchrun's store, between hosts: each message under a key of its own.

    Args:
        store: a client of its own; a blocking call on a shared one would hold up other threads.
        outgoing: prefix of the keys written here and read at the other end.
        incoming: prefix of the keys read here.
    """

    def __init__(self, store: dist.Store, outgoing: str, incoming: str) -> None:
        self._store = store
        self._outgoing = outgoing
        self._incoming = incoming
        self._sent = 0
        self._received = 0
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """See `Channel`."""
        with self._lock:
            self._store.set(f"{self._outgoing}/{self._sent}", message.decode())
            self._sent += 1

    def receive(self, timeout: float) -> bytes | None:
        """See `Channel`. Polls: a blocking get would hold the store's lock against `send`."""
        key = f"{self._incoming}/{self._received}"
        deadline = time.monotonic() + timeout
        while not self._store.check([key]):
            if time.monotonic() >= deadline:
                return None
            time.sleep(_STORE_POLL_SECONDS)
        message = bytes(self._store.get(key))
        self._store.delete_key(key)
        self._received += 1
        return message
