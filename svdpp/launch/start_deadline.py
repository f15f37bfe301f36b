"""Deadline for the start of ranks; at the deadline, a process that blocks the start is killed.

`Process.start` of multiprocessing has no timeout. It waits forever for a stopped fork server, or
for a spawned process that does not read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import threading
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path
from types import TracebackType

from svdpp.errors import RankError
from svdpp.launch import process_lifetime

_POLL_SECONDS = 0.1
#: Texts by which child processes are recognised: the first is in the command line of the fork
#: server, the second in those of processes that multiprocessing has spawned.
_FORK_SERVER, _SPAWNED = b"multiprocessing.forkserver", b"multiprocessing.spawn"
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
#: Message of CPython's RuntimeError when a thread cannot be started.
_NO_THREAD = "can't start new thread"
#: Messages of CPython, libgomp, OpenBLAS and the C++ library when a thread cannot be started.
_REFUSALS = (
    _NO_THREAD,
    "Thread creation failed",
    "pthread_create failed",
    "Resource temporarily unavailable",
)
#: Message about a process or thread that the system refuses to start.
NO_FURTHER_THREAD = "the system starts no further process or thread"
#: Hint of errors about processes and threads that the system refuses to start.
LIMIT_HINT = (
    "raise the limit (ulimit -u for processes, ulimit -n for files, pids.max of a "
    "container), or use fewer ranks"
)


class StartDeadline:
    """Context manager that starts ranks with a deadline, at which blocking processes are killed.

    Time during which this process itself is stopped, for example by Ctrl-Z, does not count.

    Args:
        seconds: Seconds until the deadline.

    Raises:
        RankError: Raised at the end of the `with` block, if a process was killed at the deadline,
            or the system refused to start a process.
    """

    def __init__(self, seconds: float) -> None:
        self.rank = 0
        """Rank whose process is being started; set by the caller, for error messages."""
        self._seconds = seconds
        self._earlier_children = _children_with(_SPAWNED)
        self._has_ended, self._has_expired = threading.Event(), threading.Event()

    def __enter__(self) -> StartDeadline:
        try:
            threading.Thread(target=self._watch, name="start-deadline", daemon=True).start()
        except RuntimeError as error:
            raise self._refused(error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        if self._has_expired.is_set() and isinstance(error, (OSError, EOFError)):
            raise RankError(
                f"rank {self.rank} never started within {self._seconds:.0f} s: the process that "
                "starts it does not respond",
                "check whether a process of svdpp is stopped or waits for a disk, or raise "
                "`start_timeout_seconds`",
                details={"rank": self.rank, "timeout_seconds": self._seconds},
            ) from error
        if error is not None and _is_refusal(error):
            raise self._refused(error) from error

    def _refused(self, error: BaseException) -> RankError:
        details = {}
        # An EOFError means that the fork server has ended, because it could not fork.
        if isinstance(error, EOFError):
            reason = f"the fork server {fork_server_end() or 'has ended'}"
        else:
            reason = getattr(error, "strerror", None) or str(error)
            details = _soft_limit(error)
        return RankError(
            f"the process of rank {self.rank} cannot be started: {reason}{_shown(details)}",
            LIMIT_HINT,
            details={"rank": self.rank, **details},
        )

    def _watch(self) -> None:
        # The time is counted in polls, because this process does not poll while it is stopped.
        left = self._seconds
        while left > 0:
            if self._has_ended.wait(_POLL_SECONDS):
                return
            left -= _POLL_SECONDS
        self._has_expired.set()
        end_fork_server()
        _kill_children(_children_with(_SPAWNED) - self._earlier_children)


def end_fork_server(*, only_if_stopped: bool = False) -> None:
    """Kill this process's fork server, even if it is stopped.

    The kernel then kills the ranks that this server has forked, and their exit codes are lost.
    multiprocessing starts another fork server when one is needed.

    Args:
        only_if_stopped: Whether the server is killed only if it is stopped (SIGSTOP).
    """
    servers = _children_with(_FORK_SERVER)
    _kill_children({pid for pid in servers if not only_if_stopped or _is_stopped(pid)})


def fork_server_end() -> str | None:
    """Return how the fork server of this process has ended, such as `was killed by SIGKILL`.

    Returns:
        Words to put after `the fork server`. None if the server runs, was never started, or was
        replaced by another server.
    """
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is None:
        return None
    try:  # with WNOWAIT, the exit code stays available to Python
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if end is None:
        return None
    if end.si_code == os.CLD_EXITED:
        return f"has ended with exit code {end.si_status}"
    return f"was killed by {signal.Signals(end.si_status).name}"


def _kill_children(pids: set[int]) -> None:
    """Kill child processes, and wait for their end; their exit codes stay available to Python."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def limit_error(error: BaseException) -> RankError | None:
    """Return a `RankError` if the system refused to start a process or thread, or to open a file.

    Args:
        error: Exception of Python or a library.

    Returns:
        Error that names the limit; None if `error` has another cause.
    """
    number = getattr(error, "errno", None)
    if number in _TOO_MANY_FILES:
        text = "the system opens no further file: too many files are open"
    elif number == errno.EAGAIN or names_limit(str(error)):
        text = f"{NO_FURTHER_THREAD}: too many of them are running"
    else:
        return None
    details = _soft_limit(error)
    return RankError(text + _shown(details), LIMIT_HINT, details={"errno": number, **details})


def names_limit(output: str) -> bool:
    """Whether the output of a process says that the system refused to start a thread."""
    return any(words in output for words in _REFUSALS)


def _soft_limit(error: BaseException) -> dict[str, int]:
    """Return this user's limit of open files or of processes, whichever has caused `error`.

    Returns:
        Limit for the `details` of an error, such as `{"limit": 1024}`; empty if there is no limit.
    """
    is_of_files = getattr(error, "errno", None) in _TOO_MANY_FILES
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE if is_of_files else resource.RLIMIT_NPROC)
    return {} if soft == resource.RLIM_INFINITY else {"limit": soft}


def _shown(details: Mapping[str, int]) -> str:
    return f" (limit: {details['limit']})" if "limit" in details else ""


def _is_refusal(error: BaseException) -> bool:
    """Whether an exception means that the system refused to start a process or thread."""
    if isinstance(error, OSError):
        return error.errno in (errno.EAGAIN, errno.ENOMEM, *_TOO_MANY_FILES)
    return isinstance(error, EOFError) or _NO_THREAD in str(error)


def _children_with(words: bytes) -> set[int]:
    """Return the ids of this process's children whose command lines contain the given words."""
    found = set()
    for pid in process_lifetime.children_of([os.getpid()]):
        with contextlib.suppress(OSError):  # an OSError means that the process has ended meanwhile
            if words in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return stat.rpartition(")")[2].split()[0] in ("T", "t")
    return False
