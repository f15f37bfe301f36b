"""The ranks that the parent starts on this machine: start, messages, output, end."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.multiprocessing as torch_mp

from svdpp.errors import RequestError
from svdpp.launch import environment, fork_server, process_group, process_lifetime
from svdpp.launch.group import (
    GUARD,
    Entry,
    Group,
    PipeChannel,
    QueuedChannel,
    RankContext,
    RankLocation,
)
from svdpp.launch.world import World

_GRACE_SECONDS = 2.0
_TAIL_CHARS = 4000


class StartedGroup(Group):
    """Ranks started through torch.multiprocessing on this machine.

    Each runs `entry` with `argument`, which is pickled. CPU ranks are forked from a server, which
    imports `preload` once for all: eight start in about the time of one. CUDA ranks are spawned,
    and each imports torch and diffusers itself.

    With `ignores_signals` the ranks survive INT, TERM and HUP, which a terminal and systemd send to
    all processes; they end with this process in any case.
    """

    def __init__(
        self,
        entry: Entry,
        argument: Any,
        *,
        world_size: int,
        backend: str,
        device: str = "cpu",
        preload: Sequence[str] = (),
        ignores_signals: bool = False,
    ) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # A rank that imports the script, and has made nothing yet that would stay behind. The
            # parent says what is wrong.
            os._exit(1)
        if getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
            raise RequestError(f"ranks import your script, which stdin does not allow: {GUARD}")
        super().__init__(world_size)
        start_method = fork_server.start_method(device)
        context: Any = torch_mp.get_context(start_method)
        # Only this user can open the folder, so no other user can join the store in it. The fork
        # server removes what is in multiprocessing's folder if this process is killed.
        within = util.get_temp_dir() if start_method == "forkserver" else None
        self._folder = process_lifetime.make_folder("svdpp-", within)
        pipes = [context.Pipe(duplex=True) for _ in range(world_size)]
        self._channels = {rank: QueuedChannel(ours) for rank, (ours, _) in enumerate(pipes)}
        is_main_thread = threading.current_thread() is threading.main_thread()
        start = _StartArguments(
            *(entry, argument, world_size, backend, self._folder),
            ends_with_thread=start_method == "forkserver" or is_main_thread,
            ignores_signals=ignores_signals,
        )
        theirs = [connection for _, connection in pipes]
        self._processes: list[Any] = []
        try:
            with _ready_to_start(start_method, preload):
                # torch's start_processes leaves a file behind if a signal interrupts it.
                for rank in range(world_size):
                    arguments = (rank, start, theirs)
                    # Daemons: at its exit this process would wait for processes that are not.
                    process = context.Process(target=_started_main, args=arguments, daemon=True)
                    self._processes.append(process)
                    process.start()
        except BaseException:  # usually a signal
            process_lifetime.kill_with_children(self.pids)
            process_lifetime.remove_folder(self._folder)
            raise
        for connection in theirs:
            connection.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the started ranks, by rank."""
        return [process.pid for process in self._processes if process.pid]

    def location(self, rank: int) -> RankLocation:
        """See `Group`."""
        return RankLocation(socket.gethostname(), rank)

    def _sentinels(self) -> list[Any]:
        return [process.sentinel for process in self._processes if process.is_alive()]

    def exited(self) -> dict[int, int | None]:
        """See `Group`."""
        return {
            rank: process.exitcode
            for rank, process in enumerate(self._processes)
            if process.exitcode is not None
        }

    def output_tail(self, rank: int) -> str | None:
        """See `Group`."""
        try:
            return _output_file(self._folder, rank).read_text(errors="replace")[-_TAIL_CHARS:]
        except FileNotFoundError:  # the rank makes the file as soon as it has imported the script
            return None

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
        for channel in self._channels.values():
            channel.close()
        process_lifetime.remove_folder(self._folder)


@dataclass(frozen=True)
class _StartArguments:
    entry: Entry
    argument: Any
    world_size: int
    backend: str
    folder: Path
    ends_with_thread: bool
    """Whether the kernel may kill the rank when the thread that started it ends: the main thread of
    the fork server or of the parent."""
    ignores_signals: bool


def _started_main(rank: int, start: _StartArguments, connections: Sequence[Connection]) -> None:
    if start.ends_with_thread:
        process_lifetime.end_with_parent()
    if start.ignores_signals:
        process_lifetime.ignore_signals()
    else:  # a rank ends by the signal, so that the parent reports a dead rank
        process_lifetime.exit_on_signals(process_lifetime.exit_by_signal)
    _end_with_starter(multiprocessing.parent_process(), start.folder)
    _redirect_output(_output_file(start.folder, rank))
    for other, connection in enumerate(connections):
        if other != rank:
            connection.close()
    world = World(rank=rank, local_rank=rank, size=start.world_size, local_size=start.world_size)
    context = RankContext(
        world,
        start.backend,
        PipeChannel(connections[rank]),
        join=lambda: process_group.join_file_store(world, start.backend, start.folder / "store"),
        leave=lambda: None,  # the process exits at once; closing NCCL could wait for a peer
    )
    _run_to_exit(start.entry, context, start.argument)


def _run_to_exit(entry: Entry, context: RankContext, argument: Any) -> None:
    """Runs the entry and exits at once: neighbours must not wait for Python's clean-up."""
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
    """Protects processes that are still importing from Ctrl-C, while the ranks start."""
    if start_method == "spawn":
        resource_tracker.ensure_running()  # first, because starting it unblocks the signals
        with environment.defaults(), process_lifetime.signals_blocked():
            yield
        return
    fork_server.start(preload)
    yield  # the first rank waits for the server's imports, and Ctrl-C must end that wait


def _output_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.txt"


def _redirect_output(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _end_with_starter(parent: Any, folder: Path) -> None:
    """Starts a thread that kills this process when its starter ends, also if a call blocks.

    The thread also removes the temporary files of the starter, which cannot do so any more. The
    fork server does the same, but it may have been killed, and a spawned rank has none.
    """

    def wait_for_end() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        process_lifetime.remove_multiprocessing_folder()
        process_lifetime.kill_children()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_end, name="end-with-starter", daemon=True).start()
