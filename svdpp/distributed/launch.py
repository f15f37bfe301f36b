"""Owns starting ranks on this machine or joining torchrun's, hearing from them, and ending them."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch.multiprocessing as torch_mp

from svdpp.distributed import fork_server, process_end, process_group, scratch
from svdpp.distributed.channel import Channel, PipeChannel, StoreChannel
from svdpp.distributed.process_group import World

_GRACE_SECONDS = 2.0
_REPORT_SECONDS = 4.0


@dataclass(frozen=True)
class Member:
    """A rank's own side of the group.

    Args:
        world: its place.
        backend: of the latents' wire, `gloo` or `nccl`.
        channel: to the parent.
        join: meets the other ranks; blocks until all are there.
    """

    world: World
    backend: str
    channel: Channel
    join: Callable[[], None]


#: What a rank runs: a module-level function of its side of the group and of what it was given.
Entry = Callable[[Member, Any], None]


class Group(Protocol):
    """The parent's side: ranks started here, or torchrun's."""

    world_size: int

    def send(self, rank: int, message: bytes) -> None:
        """Sends a message down to `rank`; one that is gone is reported by `exited`."""
        ...

    def poll(self, timeout: float) -> list[tuple[int, bytes]]:
        """Messages that have come up, each with its rank, waiting up to `timeout` seconds."""
        ...

    def exited(self) -> dict[int, int]:
        """Exit code of every rank that has ended; minus the signal's number where one ended it."""
        ...

    def last_words(self, rank: int) -> str:
        """The end of what `rank` and its libraries printed."""
        ...

    def end(self, timeout: float) -> bool:
        """Waits for ranks that have been told to stop; whether all did, without an error."""
        ...

    def kill(self) -> None:
        """Ends every rank that is still there, and everything that was made for them."""
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
        self._folder = scratch.make_folder("svdpp-")
        pipes = [context.Pipe(duplex=True) for _ in range(world_size)]
        self._channels = [PipeChannel(ours) for ours, _ in pipes]
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
            process_end.kill_with_children([p.pid for p in self._processes if p.pid])
            scratch.remove_folder(self._folder)
            raise
        for connection in theirs:
            connection.close()

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes]

    def send(self, rank: int, message: bytes) -> None:
        """See `Group`."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
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
            connection.close()
        return messages

    def exited(self) -> dict[int, int]:
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

    def kill(self) -> None:
        """See `Group`."""
        process_end.kill_with_children([p.pid for p in self._processes if p.is_alive()])
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for channel in self._channels:
            channel.connection.close()
        scratch.remove_folder(self._folder)


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
    process_end.end_with_parent()  # under forkserver the server: ranks are of no use without it
    _die_with(multiprocessing.parent_process(), start.folder)
    # A rank that gets INT for itself ends by it, and the parent sees a rank that died.
    process_end.die_by_interrupts()
    _redirect_output(_output_file(start.folder, rank))
    for other, connection in enumerate(connections):
        if other != rank:
            connection.close()
    world = World(rank, rank, start.world_size)
    member = Member(
        world,
        start.backend,
        PipeChannel(connections[rank]),
        lambda: process_group.join_file_store(world, start.backend, start.folder / "store"),
    )
    _run_to_exit(start.entry, member, start.argument)


def _run_to_exit(entry: Entry, member: Member, argument: Any) -> None:
    """Ends the process at once when the entry does: neighbours must not wait for its clean-up."""
    code = 1
    try:
        entry(member, argument)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@contextlib.contextmanager
def _ready_to_start(start_method: str, preload: Sequence[str]) -> Iterator[None]:
    """Sees to it that whatever is executed anew for the ranks does not answer Ctrl-C by itself."""
    if start_method == "spawn":
        fork_server.quiet_libraries()
        resource_tracker.ensure_running()  # it would let Ctrl-C through again
        with process_end.interrupts_held():
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

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        scratch.remove_multiprocessing_folder()
        process_end.kill_with_children([os.getpid()])

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


class JoinedGroup:
    """Torchrun's world, seen from its rank 0, whose own entry runs in a thread of this process."""

    def __init__(self, entry: Entry, argument: Any, *, world: World, backend: str) -> None:
        self.world_size = world.world_size
        process_end.end_with_parent()
        process_group.join_torchrun(world, backend)
        store = process_group.torchrun_store()
        self._channels = [
            StoreChannel(store, f"svdpp/down/{rank}", f"svdpp/up/{rank}")
            for rank in range(world.world_size)
        ]
        member = _joined_member(world, backend)
        self._failed = False
        self._thread = threading.Thread(
            target=self._run, args=(entry, member, argument), name="rank-0", daemon=True
        )
        self._thread.start()

    def _run(self, entry: Entry, member: Member, argument: Any) -> None:
        try:
            entry(member, argument)
        except BaseException:
            self._failed = True
            raise

    def send(self, rank: int, message: bytes) -> None:
        """See `Group`."""
        self._channels[rank].send(message)

    def poll(self, timeout: float) -> list[tuple[int, bytes]]:
        """See `Group`."""
        deadline = time.monotonic() + timeout
        while True:
            messages = []
            for rank, channel in enumerate(self._channels):
                while (message := channel.receive(0)) is not None:
                    messages.append((rank, message))
            if messages or time.monotonic() >= deadline:
                return messages
            time.sleep(0.05)

    def exited(self) -> dict[int, int]:
        """See `Group`; torchrun itself ends everyone when another rank ends badly."""
        return {} if self._thread.is_alive() else {0: int(self._failed)}

    def last_words(self, rank: int) -> str:  # noqa: ARG002
        """See `Group`; torchrun's ranks print to its own terminal or log folder."""
        return ""

    def end(self, timeout: float) -> bool:
        """See `Group`; for rank 0 alone, the others answer to torchrun."""
        self._thread.join(timeout)
        return not self._thread.is_alive() and not self._failed

    def kill(self) -> None:
        """Nothing to do: when this process ends, torchrun ends the others."""


def serve_joined(entry: Entry, argument: Any, *, world: World, backend: str) -> None:
    """Runs `entry` as a rank other than 0 of torchrun's world, to its end."""
    process_end.end_with_parent()
    process_group.join_torchrun(world, backend)
    try:
        entry(_joined_member(world, backend), argument)
    except Exception:
        # Rank 0 has been told and says so; if this one ended first, torchrun would silence it.
        time.sleep(_REPORT_SECONDS)
        raise


def _joined_member(world: World, backend: str) -> Member:
    store = process_group.torchrun_store()
    channel = StoreChannel(store, f"svdpp/up/{world.rank}", f"svdpp/down/{world.rank}")
    return Member(world, backend, channel, lambda: None)
