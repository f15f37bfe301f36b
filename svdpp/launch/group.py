"""The channel between a rank and the parent, and the parent's view of all its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from svdpp.errors import exit_code_of
from svdpp.launch import process_lifetime
from svdpp.launch.connections import Clock
from svdpp.launch.world import World

#: What a program has to do whose ranks are started as multiprocessing starts processes.
GUARD = 'put what it does under `if __name__ == "__main__":`, and run it from a file'
#: Control messages to a launcher's ranks; what follows END is JSON. Commands begin with a brace.
BEGIN, END = b"!", b"."

_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.1
_TAIL_CHARS = 4000


class Channel:
    """One end of the connection between a rank and the parent: a pipe, or a socket of two hosts."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.RLock()

    def send(self, message: bytes) -> None:
        """Sends a whole message. Several threads may call it."""
        with self._lock:
            self.connection.send_bytes(message)

    def receive(self, timeout: float) -> bytes | None:
        """Returns the next message, or None after `timeout` seconds."""
        return self.connection.recv_bytes() if self.connection.poll(timeout) else None


class QueuedChannel(Channel):
    """The parent's end; `send` queues the message for a thread and returns at once.

    A rank reads its end only between actions. A pipe holds a few hundred kilobytes, so a direct
    write could block the parent for as long as the rank is busy or stalled.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_queued, name="sender", daemon=True)
        self._sender.start()

    def send(self, message: bytes) -> None:
        """See `Channel`. Does not raise if the rank has ended."""
        self._messages.put(message)

    def close(self, timeout: float = 0.0) -> None:
        """Closes the connection. What is not sent within `timeout` is dropped."""
        if self.connection.closed:
            return
        self._messages.put(None)
        self._sender.join(timeout)
        if self._sender.is_alive():  # it may wait for the rank to read
            descriptor = os.dup(self.connection.fileno())
            with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as own:
                own.shutdown(socket.SHUT_RDWR)
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
        host: this host's name if a launcher started the ranks; otherwise empty.
        clock: this host's clocks relative to rank 0's.
    """

    world: World
    backend: str
    channel: Channel
    join: Callable[[], None]
    host: str = ""
    clock: Clock = field(default_factory=Clock)


#: The function that a rank runs, at module level; takes the context and one argument.
Entry = Callable[[RankContext, Any], None]


@dataclass(frozen=True)
class Member:
    """One rank, as the parent sees it."""

    host: str
    """The host's name."""
    local_rank: int
    """The rank's number on that host."""
    channel: QueuedChannel
    process: Any = None
    """Its process, or what has the same `exitcode`; None if the launcher alone can wait for it."""


class Group:
    """The parent's ranks, which it has started (`started`), or which a launcher has (`joined`).

    `folder` has the output of started ranks, and is removed with them. A launcher's ranks print to
    the launcher's terminal or log folder.
    """

    def __init__(self, members: Sequence[Member], folder: Path | None = None) -> None:
        self.members = members
        self._folder = folder
        self._gone: list[int] = []

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def pids(self) -> list[int]:
        """Process ids of the started ranks, by rank."""
        return [process.pid for process in self._processes()]

    def send(self, rank: int, message: bytes) -> None:
        """Sends a message to `rank`. Does not raise if the rank has ended; see `exited`."""
        self.members[rank].channel.send(message)

    def poll(self, timeout: float) -> list[tuple[int, bytes]]:
        """Waits up to `timeout` seconds for messages or ends; returns messages and their ranks."""
        by_connection: dict[Any, int] = {
            member.channel.connection: rank
            for rank, member in enumerate(self.members)
            if not member.channel.connection.closed
        }
        sentinels = [process.sentinel for process in self._processes() if process.is_alive()]
        messages: list[tuple[int, bytes]] = []
        for ready in wait([*by_connection, *sentinels], timeout):
            if ready in by_connection:
                messages += self._read_all(by_connection[ready])
        return messages

    def _read_all(self, rank: int) -> list[tuple[int, bytes]]:
        member = self.members[rank]
        messages = []
        try:
            while (message := member.channel.receive(0)) is not None:
                messages.append((rank, message))
        except (EOFError, ConnectionError):
            member.channel.close()
            if member.process is None:
                self._gone.append(rank)
        except OSError:
            member.channel.close()  # the host is unreachable; missing heartbeats report that
        return messages

    def exited(self) -> dict[int, int | None]:
        """Exit code of every rank that has ended; minus the signal's number if a signal ended it.

        None if only the launcher knows the code. A launcher's ranks come in the order in which
        their end was noticed.
        """
        codes: dict[int, int | None] = dict.fromkeys(self._gone)
        for rank, member in enumerate(self.members):
            if member.process is not None and member.process.exitcode is not None:
                codes[rank] = member.process.exitcode
        return codes

    def output_tail(self, rank: int) -> str | None:
        """The end of what a started rank printed; None if it ended before its entry."""
        if self._folder is None:
            return ""
        try:
            return output_file(self._folder, rank).read_text(errors="replace")[-_TAIL_CHARS:]
        except FileNotFoundError:  # the rank makes the file as soon as it has imported the script
            return None

    def end(self, timeout: float) -> bool:
        """Waits for ranks that were commanded to stop; returns whether all ended without error."""
        deadline = time.monotonic() + timeout
        while len(codes := self.exited()) < self.world_size and time.monotonic() < deadline:
            self.poll(_POLL_SECONDS)
        return len(codes) == self.world_size and not any(codes.values())

    def kill(self, error: BaseException | None = None) -> None:
        """Ends every rank that still runs, and removes the group's temporary files.

        Args:
            error: the reason, sent to a launcher's ranks; None if all work is done.
        """
        process_lifetime.kill_with_children([p.pid for p in self._processes() if p.is_alive()])
        for member in self.members:
            if member.process is None:
                member.channel.send(_end_message(error))
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self._processes():
            process.join(max(0.0, deadline - time.monotonic()))
        for member in self.members:
            is_local = member.process is not None
            member.channel.close(0.0 if is_local else max(0.0, deadline - time.monotonic()))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _processes(self) -> list[Any]:
        return [m.process for m in self.members if getattr(m.process, "pid", None) is not None]


def output_file(folder: Path, rank: int) -> Path:
    """Where a started rank prints to."""
    return folder / f"rank{rank}.txt"


def _end_message(error: BaseException | None) -> bytes:
    if error is None:
        return END + json.dumps({"code": 0, "error": None}).encode()
    reason = str(getattr(error, "message", error))
    return END + json.dumps({"code": exit_code_of(error), "error": reason}).encode()
