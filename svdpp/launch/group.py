"""The interface to a group of ranks, for the parent and each rank, and its channels."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol

from svdpp.launch.connections import Clock
from svdpp.launch.world import World

#: What a program has to do whose ranks are started as multiprocessing starts processes.
GUARD = 'put what it does under `if __name__ == "__main__":`, and run it from a file'


class Channel(Protocol):
    """One end of the connection between a rank and the parent."""

    def send(self, message: bytes) -> None:
        """Sends a whole message. Several threads may call it."""

    def receive(self, timeout: float) -> bytes | None:
        """Returns the next message, or None after `timeout` seconds."""


class PipeChannel:
    """A channel over a pipe between processes of one machine, or over a socket between hosts."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.Lock()
        self._has_timed_out = False

    def send(self, message: bytes) -> None:
        """See `Channel`."""
        with self._lock:
            try:
                self.connection.send_bytes(message)
            except OSError as error:
                self._has_timed_out |= not isinstance(error, ConnectionError)
                raise

    def has_timed_out(self) -> bool:
        """Whether a send has learned that nothing reaches the other host.

        The kernel says so once; after a send has learned it, a read only finds the end of the data.
        """
        with self._lock:
            return self._has_timed_out

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


@dataclass(frozen=True)
class RankContext:
    """A rank's view of the group.

    Args:
        join: joins the process group; blocks until all ranks have joined.
        leave: leaves the process group, before the process starts other work.
        host: this host's name if a launcher started the ranks; otherwise empty.
        clock: this host's clocks relative to rank 0's.
    """

    world: World
    backend: str
    channel: Channel
    join: Callable[[], None]
    leave: Callable[[], None]
    host: str = ""
    clock: Clock = field(default_factory=Clock)


class RankLocation(NamedTuple):
    """Where a rank runs."""

    host: str
    """The host's name."""
    local_rank: int
    """The rank's number on that host."""


#: The function that a rank runs, at module level; takes the context and one argument.
Entry = Callable[[RankContext, Any], None]


class Group(ABC):
    """The parent's view: ranks that it started (`started`), or a launcher's ranks (`joined`)."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._channels: dict[int, PipeChannel] = {}
        self._exit_codes: dict[int, int | None] = {}

    @abstractmethod
    def location(self, rank: int) -> RankLocation:
        """Where `rank` runs."""

    def send(self, rank: int, message: bytes) -> None:
        """Sends a message to `rank`. Does not raise if the rank has ended; see `exited`."""
        with contextlib.suppress(OSError):
            self._channels[rank].send(message)

    def poll(self, timeout: float) -> list[tuple[int, bytes]]:
        """Waits up to `timeout` seconds for messages or ends; returns messages and their ranks."""
        by_connection: dict[Any, int] = {
            channel.connection: rank
            for rank, channel in self._channels.items()
            if not channel.connection.closed
        }
        messages: list[tuple[int, bytes]] = []
        for ready in wait([*by_connection, *self._sentinels()], timeout):
            if ready in by_connection:
                messages += self._read_all(by_connection[ready])
        return messages

    def _sentinels(self) -> list[Any]:
        return []

    def _read_all(self, rank: int) -> list[tuple[int, bytes]]:
        channel = self._channels[rank]
        messages = []
        try:
            while channel.connection.poll():
                messages.append((rank, channel.connection.recv_bytes()))
        except (EOFError, ConnectionError):
            channel.close()
            self._exit_codes.setdefault(rank, None)
        except OSError:
            channel.close()  # the host is unreachable; missing heartbeats report that
        return messages

    @abstractmethod
    def exited(self) -> dict[int, int | None]:
        """Exit code of every rank that has ended; minus the signal's number if a signal ended it.

        None if only the launcher knows the code. A launcher's ranks come in the order in which
        their end was noticed.
        """

    def output_tail(self, rank: int) -> str | None:  # noqa: ARG002
        """The end of the output of `rank` and its libraries; None if it ended before its entry.

        A launcher's ranks print to the launcher's terminal or log folder.
        """
        return ""

    @abstractmethod
    def end(self, timeout: float) -> bool:
        """Waits for ranks that were commanded to stop; returns whether all ended without error."""

    @abstractmethod
    def kill(self, error: BaseException | None = None) -> None:
        """Ends every rank that still runs, and removes the group's temporary files.

        Args:
            error: the reason, sent to a launcher's ranks; None if all work is done.
        """
