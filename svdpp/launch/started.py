"""Owns starting ranks on this machine, hearing from them, and ending them."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch.multiprocessing as torch_mp

from svdpp.launch import fork_server, process_group, process_lifetime, temp_folders
from svdpp.launch.channel import Channel, PipeChannel, QueuedChannel
from svdpp.launch.clock import Clock
from svdpp.launch.world import World

_GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class RankContext:
    """A rank's own side of the group.

    Args:
        world: its place.
        backend: of the latents' wire, `gloo` or `nccl`.
        channel: to the parent.
        join: meets the other ranks; blocks until all are there.
        host: this host's name, where others have started the ranks; else empty.
        clock: this host's beside rank 0's.
        fetch: waits for the file that rank 0 was asked for; None on rank 0's own host.
    """

    world: World
    backend: str
    channel: Channel
    join: Callable[[], None]
    host: str = ""
    clock: Clock = field(default_factory=Clock)
    fetch: Callable[[], bytes] | None = None


class RankLocation(NamedTuple):
    """Where a rank is."""

    host: str
    """The host's name."""
    local_rank: int
    """Its number on that host."""


#: What a rank runs: a module-level function of its side of the group and of what it was given.
Entry = Callable[[RankContext, Any], None]


class Group(Protocol):
    """The parent's side: ranks started here, or those of a launcher (`joined`)."""

    world_size: int

    def location(self, rank: int) -> RankLocation:
        """Where `rank` is."""
        ...

    def send(self, rank: int, message: bytes) -> None:
        """Sends a message down to `rank`; one that is gone is reported by `exited`."""
        ...

    def poll(self, timeout: float) -> list[tuple[int, bytes]]:
        """Messages that have come up, each with its rank, waiting up to `timeout` seconds."""
        ...

    def exited(self) -> dict[int, int | None]:
        """Exit code of every rank that has ended; minus the signal's number where one ended it.

        None where only its launcher knows; ranks in the order in which they were seen to end.
        """
        ...

    def last_words(self, rank: int) -> str:
        """The end of what `rank` and its libraries printed."""
        ...

    def end(self, timeout: float) -> bool:
        """Waits for ranks that have been told to stop; whether all did, without an error."""
        ...

    def kill(self, error: BaseException | None = None) -> None:
        """Ends every rank that is still there, and everything that was made for them.

        Args:
            error: why, for ranks that outlive this; None: all is done.
        """
        ...


class StartedGroup:
    """Ranks started through torch.multiprocessing on this machine.

    Args:
        entry: what each rank runs.
        argument: given to each `entry`; anything that can be pickled.
        world_size: number of ranks.
        backend: of the latents' wire.
        preload: modules that the fork server imports once for all ranks.
        start_method: `forkserver` starts eight ranks in about the time of one; `spawn` imports
            torch anew in each.
    """

    def __init__(
        self,
        entry: Entry,
        argument: Any,
        *,
        world_size: int,
        backend: str,
        preload: Sequence[str] = (),
        start_method: str = "forkserver",
    ) -> None:
        self.world_size = world_size
        context: Any = torch_mp.get_context(start_method)
        # For this user alone: nobody else can join the store in it.
        self._folder = temp_folders.make_folder("svdpp-")
        pipes = [context.Pipe(duplex=True) for _ in range(world_size)]
        self._channels = [QueuedChannel(ours) for ours, _ in pipes]
        start = _Start(entry, argument, world_size, backend, self._folder)
        theirs = [connection for _, connection in pipes]
        self._processes: list[Any] = []
        try:
            with _ready_to_start(start_method, preload):
                # Not by torch's start_processes, which leaves a file when a signal interrupts it.
                for rank in range(world_size):
                    arguments = (rank, start, theirs)
                    # Daemons: else this process would wait for them if it ended without `kill`.
                    process = context.Process(target=_started_main, args=arguments, daemon=True)
                    self._processes.append(process)
                    process.start()
        except BaseException:  # a signal, above all
            process_lifetime.kill_with_children(self.pids)
            temp_folders.remove_folder(self._folder)
            raise
        for connection in theirs:
            connection.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of those that were started, by rank."""
        return [process.pid for process in self._processes if process.pid]

    def location(self, rank: int) -> RankLocation:
        """See `Group`."""
        return RankLocation(socket.gethostname(), rank)

    def send(self, rank: int, message: bytes) -> None:
        """See `Group`."""
        self._channels[rank].send(message)

    def poll(self, timeout: float) -> list[tuple[int, bytes]]:
        """See `Group`; also returns when a rank has ended."""
        by_connection: dict[Any, int] = {
            channel.connection: rank
            for rank, channel in enumerate(self._channels)
            if not channel.connection.closed
        }
        running = [process.sentinel for process in self._processes if process.is_alive()]
        messages: list[tuple[int, bytes]] = []
        for ready in multiprocessing.connection.wait([*by_connection, *running], timeout):
            if ready in by_connection:
                messages += self._read_all(by_connection[ready])
        return messages

    def _read_all(self, rank: int) -> list[tuple[int, bytes]]:
        connection = self._channels[rank].connection
        messages = []
        try:
            while connection.poll():
                messages.append((rank, connection.recv_bytes()))
        except (EOFError, ConnectionResetError):
            self._channels[rank].close()
        return messages

    def exited(self) -> dict[int, int | None]:
        """See `Group`."""
        return {
            rank: process.exitcode
            for rank, process in enumerate(self._processes)
            if process.exitcode is not None
        }

    def last_words(self, rank: int) -> str:
        """See `Group`."""
        try:
            return _output_file(self._folder, rank).read_text(errors="replace")[-4000:]
        except OSError:
            return ""

    def end(self, timeout: float) -> bool:
        """See `Group`."""
        deadline = time.monotonic() + timeout
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = self.exited()
        return len(codes) == self.world_size and not any(codes.values())

    def kill(self, error: BaseException | None = None) -> None:  # noqa: ARG002
        """See `Group`."""
        process_lifetime.kill_with_children([p.pid for p in self._processes if p.is_alive()])
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for channel in self._channels:
            channel.close()
        temp_folders.remove_folder(self._folder)


@dataclass(frozen=True)
class _Start:
    """What every started process is given."""

    entry: Entry
    argument: Any
    world_size: int
    backend: str
    folder: Path


def _started_main(rank: int, start: _Start, connections: Sequence[Connection]) -> None:
    """A started rank, from its first line to its last."""
    # Under forkserver the parent is the server: ranks are of no use without it.
    process_lifetime.end_with_parent()
    _die_with(multiprocessing.parent_process(), start.folder)
    # A rank that gets a signal for itself ends by it, and the parent sees a rank that died.
    process_lifetime.exit_on_signals(process_lifetime.exit_by_signal)
    _redirect_output(_output_file(start.folder, rank))
    for other, connection in enumerate(connections):
        if other != rank:
            connection.close()
    world = World(rank=rank, local_rank=rank, size=start.world_size, local_size=start.world_size)
    context = RankContext(
        world,
        start.backend,
        PipeChannel(connections[rank]),
        lambda: process_group.join_file_store(world, start.backend, start.folder / "store"),
    )
    _run_to_exit(start.entry, context, start.argument)


def _run_to_exit(entry: Entry, context: RankContext, argument: Any) -> None:
    """Ends the process at once when the entry does: neighbours must not wait for its clean-up."""
    code = 1
    try:
        entry(context, argument)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@contextlib.contextmanager
def _ready_to_start(start_method: str, preload: Sequence[str]) -> Iterator[None]:
    """Keeps the new processes from answering Ctrl-C by themselves while they import."""
    if start_method == "spawn":
        resource_tracker.ensure_running()  # it would let signals through again
        with fork_server.child_environment(), process_lifetime.signals_held():
            yield
        return
    fork_server.start(preload)
    yield  # starting ranks waits for the server's imports, and Ctrl-C must end that wait


def _output_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.txt"


def _redirect_output(path: Path) -> None:
    """Sends this process's stdout and stderr, C++ libraries' included, to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _die_with(parent: Any, folder: Path) -> None:
    """Kills this process when the one that started it is gone, whatever it is blocked in.

    What the starter made goes too, since there is nobody else left to remove it.

    Under forkserver the kernel's parent is the server, which its children keep alive, so the
    starter's own sentinel is watched by a thread.
    """

    def liveness() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        temp_folders.remove_multiprocessing_folder()
        process_lifetime.kill_children()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=liveness, name="die-with-parent", daemon=True).start()
