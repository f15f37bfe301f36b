"""`WorkerGroup`: how the parent starts ranks, exchanges messages with them, and ends them."""

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
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from svdpp.errors import RequestError, exit_code_of
from svdpp.launch import process_lifetime
from svdpp.launch.fork_server import start_fork_server, start_method
from svdpp.launch.start_deadline import StartDeadline, end_fork_server, fork_server_end
from svdpp.launch.world import World

#: Hint for a user's program without the `__main__` guard that multiprocessing needs.
MAIN_GUARD_HINT = 'save it to a file, and put its main code under `if __name__ == "__main__":`'
#: First bytes of two messages to a rank that a launcher started: BEGIN begins the run, and END ends
#: it. JSON with the reason follows END. All other messages are commands: JSON objects, which begin
#: with a brace.
BEGIN, END = b"!", b"."

_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.1
_TAIL_CHARS = 4000
# Size of a rank's output file at which the file is renamed, and a new one is begun. Only the latest
# renamed file is kept, so the output of a server that runs for weeks does not fill the disk.
_MAX_OUTPUT_BYTES = 2**20
_OUTPUT_CHECK_SECONDS = 1.0


class ControlChannel:
    """One end of the connection between a rank and the parent: a pipe, or TCP between hosts.

    Args:
        connection: Open connection that preserves message boundaries.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.RLock()

    def send(self, message: bytes) -> None:
        """Send a message to the other end, the parent or a rank. This method is thread-safe.

        Raises:
            OSError: The other end is closed.
        """
        with self._lock:
            self.connection.send_bytes(message)

    def receive(self, timeout: float) -> bytes | None:
        """Return the next message of the other end, the parent or a rank; None if none arrives.

        Args:
            timeout: Seconds to wait for a message; 0: do not wait.

        Returns:
            Message; None if no message has arrived in time.

        Raises:
            EOFError: The other end has closed the connection.
            OSError: The connection is broken.
        """
        return self.connection.recv_bytes() if self.connection.poll(timeout) else None


class QueuedChannel(ControlChannel):
    """Parent's end of a connection, whose `send` queues messages for a sender thread.

    A direct write could block, because a rank reads only between actions and between steps, and a
    pipe's buffer is small.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_queued, name="sender", daemon=True)
        self._sender.start()

    def send(self, message: bytes) -> None:
        """Queue a message to a rank for the sender thread; no error if the rank has ended."""
        self._messages.put(message)

    def close(self, timeout: float = 0.0) -> None:
        """Send the queued messages to the rank, and close the connection.

        Args:
            timeout: Longest time for sending, in seconds; messages that are left are dropped.
        """
        if self.connection.closed:
            return
        self._messages.put(None)
        self._sender.join(timeout)
        if self._sender.is_alive():  # the sender is blocked, because the rank does not read
            descriptor = os.dup(self.connection.fileno())
            with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)
            self._sender.join()
        self.connection.close()

    def _send_queued(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._messages.get()) is not None:
                self.connection.send_bytes(message)


class ClockOffset(NamedTuple):
    """Offset between the monotonic clocks of this host and of rank 0's host."""

    monotonic_ahead: float = 0.0
    """Seconds by which this host's clock is ahead of the clock of rank 0's host."""


class LaunchContext(NamedTuple):
    """Context that a rank's entry point gets: world, channel to the parent, and a join function."""

    world: World
    backend: str
    channel: ControlChannel
    join: Callable[[], None]
    """Function that joins the process group, and blocks until all ranks have joined."""
    host: str = ""
    """Name of this host, if a launcher started the ranks; otherwise empty."""
    clock: ClockOffset = ClockOffset()


#: Entry point of a rank: a function at module level that takes the `LaunchContext` and one
#: argument.
EntryPoint = Callable[[LaunchContext, Any], None]


class WorkerHandle(NamedTuple):
    """Handle by which the parent reaches one rank."""

    host: str
    """Name of the rank's host."""
    local_rank: int
    channel: QueuedChannel
    process: Any = None
    """Process of the rank. If the rank runs in a thread of the parent, an object with an attribute
    `exitcode` instead. None: a launcher started the rank in another process."""


class WorkerGroup:
    """All ranks of a run, started by the parent (`start_ranks`) or by a launcher (`rendezvous`).

    Args:
        workers: Handles of the ranks, in the order of the ranks.
        folder: Folder with the output of the ranks, which is removed when they have ended. None: a
            launcher started the ranks.
        is_forked: Whether the ranks are forked from a fork server, and end when the server ends.
    """

    def __init__(
        self,
        workers: Sequence[WorkerHandle],
        folder: Path | None = None,
        *,
        is_forked: bool = False,
    ) -> None:
        self.workers = workers
        self._folder = folder
        self._is_forked = is_forked
        self._gone: list[int] = []

    @property
    def world_size(self) -> int:
        """Number of ranks of the group."""
        return len(self.workers)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that this process started, in the order of the ranks."""
        return [process.pid for process in self._processes()]

    def send(self, rank: int, message: bytes) -> None:
        """Send a message to a rank. No error is raised if the rank has ended; see `exited`."""
        self.workers[rank].channel.send(message)

    def poll(self, timeout: float) -> list[tuple[int, bytes]]:
        """Wait until a rank sends a message or ends, and return all messages that have arrived.

        Args:
            timeout: Seconds to wait.

        Returns:
            Pairs (rank, message) of all messages that have arrived. Messages of the same rank are
            in order.
        """
        by_connection: dict[Any, int] = {
            worker.channel.connection: rank
            for rank, worker in enumerate(self.workers)
            if not worker.channel.connection.closed
        }
        sentinels = [process.sentinel for process in self._processes() if process.is_alive()]
        messages: list[tuple[int, bytes]] = []
        for ready in wait([*by_connection, *sentinels], timeout):
            if ready in by_connection:
                messages += self._read_all(by_connection[ready])
        return messages

    def _read_all(self, rank: int) -> list[tuple[int, bytes]]:
        worker = self.workers[rank]
        messages = []
        try:
            while (message := worker.channel.receive(0)) is not None:
                messages.append((rank, message))
        except (EOFError, ConnectionError):
            worker.channel.close()
            if worker.process is None:
                self._gone.append(rank)
        except OSError:
            # The host cannot be reached. The missing heartbeats will show that the rank is lost.
            worker.channel.close()
        return messages

    def exited(self) -> dict[int, int | None]:
        """Return the exit code of each rank that has ended.

        Returns:
            Exit codes, with the rank as key. If a signal ended a rank, the code is minus the number
            of the signal. The code of a rank that torchrun or Slurm started is unknown: None. These
            ranks come first in the dict, in the order in which their end was noticed.
        """
        codes: dict[int, int | None] = dict.fromkeys(self._gone)
        for rank, worker in enumerate(self.workers):
            if worker.process is not None and worker.process.exitcode is not None:
                codes[rank] = worker.process.exitcode
        return codes

    def fork_server_end(self) -> str | None:
        """Return how the fork server of the ranks ended, such as `was killed by SIGKILL`.

        None: the server runs, or the ranks have no fork server.
        """
        return fork_server_end() if self._is_forked else None

    def output_tail(self, rank: int) -> str | None:
        """Return the last characters that a rank has printed (its stdout and stderr).

        Returns:
            At most 4000 characters; empty if a launcher started the ranks. None: the rank has not
            opened its output file, because it was still importing the user's script.
        """
        if self._folder is None:
            return ""
        path = _output_file(self._folder, rank)
        parts = []
        # While the output file is renamed, one of the two files is missing for a moment.
        for each in (_earlier_output(path), path):
            with contextlib.suppress(FileNotFoundError):
                parts.append(_tail(each))
        if not parts:  # a rank creates the file only after it has imported the user's script
            return None
        return "".join(parts)[-_TAIL_CHARS:]

    def end(self, timeout: float) -> bool:
        """Wait until all ranks have ended after a stop command; return whether none has failed.

        Args:
            timeout: Seconds to wait for all ranks together.

        Returns:
            True if all ranks have ended in time, and none with an exit code other than 0. The exit
            codes of ranks that a launcher started are unknown, and count as 0.
        """
        deadline = time.monotonic() + timeout
        while len(codes := self.exited()) < self.world_size and time.monotonic() < deadline:
            self.poll(_POLL_SECONDS)
        return len(codes) == self.world_size and not any(codes.values())

    def kill(self, error: BaseException | None = None) -> None:
        """Kill the ranks that still run, and remove the temporary files of the ranks.

        Args:
            error: Reason, which is sent to ranks that a launcher started; None: all work is done.
        """
        alive = [process.pid for process in self._processes() if process.is_alive()]
        process_lifetime.kill_with_children(alive)
        for worker in self.workers:
            if worker.process is None:
                worker.channel.send(_end_message(error))
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self._processes():
            process.join(max(0.0, deadline - time.monotonic()))
        for worker in self.workers:
            is_local = worker.process is not None
            worker.channel.close(0.0 if is_local else max(0.0, deadline - time.monotonic()))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        _groups.discard(self)

    def _processes(self) -> list[Any]:
        processes = [worker.process for worker in self.workers]
        # Ranks that a launcher started have no process here. A process that could not be started
        # has no process id.
        return [process for process in processes if getattr(process, "pid", None) is not None]


def _output_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.txt"


def _earlier_output(path: Path) -> Path:
    return path.with_suffix(".earlier.txt")


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        # Four times as many bytes are read, because a character has at most four bytes.
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * _TAIL_CHARS))
        return file.read(4 * _TAIL_CHARS).decode(errors="replace")


def redirect_output(path: Path) -> None:
    """Redirect stdout and stderr of this rank's process to a file, whose size a thread limits.

    Args:
        path: Path of the file. When the file exceeds 1 MiB, it is renamed and replaces the file
            that was renamed before.

    Raises:
        OSError: The file cannot be written.
    """

    def redirect() -> None:
        with path.open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)

    def bound() -> None:
        # a missing folder means that the parent has ended and removed it
        with contextlib.suppress(OSError):
            while True:
                time.sleep(_OUTPUT_CHECK_SECONDS)
                if os.fstat(1).st_size > _MAX_OUTPUT_BYTES:
                    os.replace(path, _earlier_output(path))
                    redirect()

    redirect()
    sys.stdout = sys.stderr  # stderr is written line by line, so a killed rank leaves its output
    threading.Thread(target=bound, name="bound-output", daemon=True).start()


def _end_message(error: BaseException | None) -> bytes:
    reason = None if error is None else str(getattr(error, "message", error))
    code = 0 if error is None else exit_code_of(error)
    return END + json.dumps({"code": code, "error": reason}).encode()


# --- start of ranks on this machine -------------------------------------------------------------


def end_if_importing_script() -> None:
    """End this process if it is a rank that imports the user's script. The parent reports an error.

    Without this, a script without the `__main__` guard would start ranks in each rank, endlessly.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(1)


def start_ranks(
    entry: EntryPoint,
    argument: Any,
    *,
    world_size: int,
    backend: str,
    device: str = "cpu",
    preload: Sequence[str] = (),
    ignores_signals: bool = False,
    start_timeout: float = 600.0,
) -> WorkerGroup:
    """Start ranks on this machine by torch.multiprocessing; each runs `entry`.

    CPU ranks are forked from a fork server, CUDA ranks are spawned.

    Args:
        entry: Entry point, a function at module level.
        argument: Second argument of `entry`, which is pickled.
        world_size: Number of ranks.
        backend: `gloo` or `nccl`.
        device: `cpu`, `cuda` or `cuda:N`.
        preload: Modules that the fork server imports once for all ranks; see `modules_for`.
        ignores_signals: Whether the ranks ignore INT, TERM and HUP, which a terminal and systemd
            send to all processes. The ranks always end when this process ends.
        start_timeout: Seconds within which all processes must have started. They need not be ready
            for work by then.

    Raises:
        RequestError: The user's program comes from stdin, which ranks cannot import.
        RankError: A process has not started in time, or the system refuses to start a process.
    """
    end_if_importing_script()
    if getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
        raise RequestError(
            f"ranks cannot import a program that comes from stdin: {MAIN_GUARD_HINT}"
        )
    method = start_method(device)
    is_main_thread = threading.current_thread() is threading.main_thread()
    start = _StartArguments(
        entry,
        argument,
        world_size,
        backend,
        # Only this user can open the folder, so no other user can join the file store in it.
        folder=process_lifetime.make_temp_folder("svdpp-"),
        ends_with_thread=method == "forkserver" or is_main_thread,
        ignores_signals=ignores_signals,
    )
    workers: list[WorkerHandle] = []
    group = WorkerGroup(workers, start.folder, is_forked=method == "forkserver")
    try:
        _start_processes(workers, start, method, preload, start_timeout)
    except BaseException:  # usually a signal that arrives during the start
        group.kill()
        # the fork server must stay alive if other groups have ranks, which would end with it
        if not _groups:
            end_fork_server()
        raise
    _groups.add(group)
    return group


def _start_processes(
    workers: list[WorkerHandle],
    start: _StartArguments,
    method: str,
    preload: Sequence[str],
    timeout: float,
) -> None:
    """Start the processes of the ranks, and append a handle to `workers` before each start."""
    # torch is imported here, and not at the top of the module, so that commands can start the fork
    # server before they import torch.
    from torch import multiprocessing as torch_multiprocessing

    context: Any = torch_multiprocessing.get_context(method)
    with contextlib.ExitStack() as while_starting:
        deadline = while_starting.enter_context(StartDeadline(timeout))
        if method == "spawn":
            # Signals are blocked, because Ctrl-C must not interrupt the imports of the ranks. The
            # resource tracker is started before, because its start unblocks signals.
            resource_tracker.ensure_running()
            while_starting.enter_context(process_lifetime.environment_defaults())
            while_starting.enter_context(process_lifetime.signals_blocked())
        else:
            # Signals are not blocked, because Ctrl-C must interrupt the imports of the fork server,
            # for which the first rank waits.
            start_fork_server(preload)
        for rank in range(start.world_size):
            deadline.rank = rank
            ours, theirs = context.Pipe(duplex=True)
            # The ranks are daemons, because at its exit Python waits for non-daemon processes.
            process = context.Process(target=_run_worker, args=(rank, start, theirs), daemon=True)
            channel = QueuedChannel(ours)
            workers.append(WorkerHandle(socket.gethostname(), rank, channel, process))
            process.start()
            theirs.close()


#: Groups of ranks that this process has started and whose ranks may still run.
_groups: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()


class _StartArguments(NamedTuple):
    entry: EntryPoint
    argument: Any
    world_size: int
    backend: str
    folder: Path
    ends_with_thread: bool
    """Whether the kernel kills the rank when the parent's thread that started the rank ends. False:
    the rank ends only when the whole parent process ends."""
    ignores_signals: bool


def _run_worker(rank: int, start: _StartArguments, connection: Connection) -> None:
    code = 1
    try:
        # The output is redirected first, because the parent reports errors from this file.
        redirect_output(_output_file(start.folder, rank))
        _bind_to_parent(start)
        world = World(
            rank=rank, local_rank=rank, size=start.world_size, local_size=start.world_size
        )

        def join() -> None:
            from svdpp.launch import process_group  # this import loads torch

            process_group.join_file_store(world, start.backend, start.folder / "store")

        start.entry(
            LaunchContext(world, start.backend, ControlChannel(connection), join), start.argument
        )
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Python's clean-up is skipped, because it takes time in which other ranks would wait for
        # the end of this rank.
        os._exit(code)


def _bind_to_parent(start: _StartArguments) -> None:
    """Make this rank's process end with its parent, and on signals unless the rank ignores them."""
    if start.ends_with_thread:
        process_lifetime.end_with_parent()
    if start.ignores_signals:
        process_lifetime.ignore_signals()
    else:  # the default action of a signal ends the rank, and the parent reports the signal
        process_lifetime.exit_on_signals(process_lifetime.exit_by_signal)
    _end_with_starter(multiprocessing.parent_process())


def _end_with_starter(parent: Any) -> None:
    """Start a thread that waits for the end of the parent, cleans up, and ends this process."""

    def wait_for_end() -> None:
        wait([parent.sentinel])
        process_lifetime.remove_temp_files()
        process_lifetime.kill_descendants()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_end, name="end-with-starter", daemon=True).start()
