"""The parent's ranks: the channel to each, their start on this machine, their output and end."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.multiprocessing as torch_mp

from svdpp.errors import RequestError, exit_code_of
from svdpp.launch import environment, fork_server, process_group, process_lifetime
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
class Clock:
    """Seconds by which this host's clocks are ahead of rank 0's."""

    monotonic_ahead: float = 0.0
    wall_ahead: float = 0.0


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


# --- the start of ranks on this machine ---------------------------------------------------------


def start_ranks(
    entry: Entry,
    argument: Any,
    *,
    world_size: int,
    backend: str,
    device: str = "cpu",
    preload: Sequence[str] = (),
    ignores_signals: bool = False,
) -> Group:
    """Starts ranks through torch.multiprocessing on this machine.

    Each runs `entry` with `argument`, which is pickled. CPU ranks are forked from a server, which
    imports `preload` once for all: eight start in about the time of one. CUDA ranks are spawned,
    and each imports torch and diffusers itself.

    With `ignores_signals` the ranks survive INT, TERM and HUP, which a terminal and systemd send to
    all processes; they end with this process in any case.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A rank that imports the script, and has made nothing yet that would stay behind. The
        # parent says what is wrong.
        os._exit(1)
    if getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
        raise RequestError(f"ranks import your script, which stdin does not allow: {GUARD}")
    start_method = fork_server.start_method(device)
    context: Any = torch_mp.get_context(start_method)
    is_main_thread = threading.current_thread() is threading.main_thread()
    start = _Start(
        entry,
        argument,
        world_size,
        backend,
        # Only this user can open the folder, so no other user can join the store in it.
        folder=process_lifetime.make_folder("svdpp-"),
        ends_with_thread=start_method == "forkserver" or is_main_thread,
        ignores_signals=ignores_signals,
    )
    members: list[Member] = []
    group = Group(members, start.folder)
    try:
        with _ready_to_start(start_method, preload):
            # torch's start_processes leaves a file behind if a signal interrupts it.
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=True)
                # Daemons: at its exit this process would wait for processes that are not.
                process = context.Process(target=_main, args=(rank, start, theirs), daemon=True)
                members.append(Member(socket.gethostname(), rank, QueuedChannel(ours), process))
                process.start()
                theirs.close()
    except BaseException:  # usually a signal
        group.kill()
        raise
    return group


@dataclass(frozen=True)
class _Start:
    entry: Entry
    argument: Any
    world_size: int
    backend: str
    folder: Path
    ends_with_thread: bool
    """Whether the kernel may kill the rank when the thread that started it ends: the main thread of
    the fork server or of the parent."""
    ignores_signals: bool


def _main(rank: int, start: _Start, connection: Connection) -> None:
    if start.ends_with_thread:
        process_lifetime.end_with_parent()
    if start.ignores_signals:
        process_lifetime.ignore_signals()
    else:  # a rank ends by the signal, so that the parent reports a dead rank
        process_lifetime.exit_on_signals(process_lifetime.exit_by_signal)
    _end_with_starter(multiprocessing.parent_process())
    _redirect_output(output_file(start.folder, rank))
    world = World(rank=rank, local_rank=rank, size=start.world_size, local_size=start.world_size)
    context = RankContext(
        world,
        start.backend,
        Channel(connection),
        join=lambda: process_group.join_file_store(world, start.backend, start.folder / "store"),
    )
    code = 1
    try:
        start.entry(context, start.argument)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # neighbours must not wait for Python's clean-up


@contextlib.contextmanager
def _ready_to_start(start_method: str, preload: Sequence[str]) -> Iterator[None]:
    """Protects processes that are still importing from Ctrl-C, while the ranks start."""
    if start_method == "spawn":
        resource_tracker.ensure_running()  # first, because starting it unblocks the signals
        with environment.defaults(), process_lifetime.signals_blocked():
            yield
        return
    fork_server.start(preload)
    yield  # the first rank waits for the server's imports, and Ctrl-C must end that wait


def _redirect_output(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _end_with_starter(parent: Any) -> None:
    """Starts a thread that kills this process when its starter ends, also if a call blocks.

    The thread also removes the temporary files of the starter, which cannot do so any more. The
    fork server does the same, but it may have been killed, and a spawned rank has none.
    """

    def wait_for_end() -> None:
        wait([parent.sentinel])
        process_lifetime.remove_temp_files()
        process_lifetime.kill_descendants()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_end, name="end-with-starter", daemon=True).start()
