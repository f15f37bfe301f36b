"""The start of ranks by the parent, on this machine, and what each does before its entry."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.multiprocessing as torch_mp

from svdpp.errors import RequestError
from svdpp.launch import environment, fork_server, process_group, process_lifetime
from svdpp.launch.group import (
    GUARD,
    Channel,
    Entry,
    Group,
    Member,
    QueuedChannel,
    RankContext,
    output_file,
)
from svdpp.launch.world import World


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
        *(entry, argument, world_size, backend),
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
        multiprocessing.connection.wait([parent.sentinel])
        process_lifetime.remove_temp_files()
        process_lifetime.kill_descendants()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_end, name="end-with-starter", daemon=True).start()
