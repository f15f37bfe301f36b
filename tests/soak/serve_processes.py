"""The view of a server's processes from outside: its fork server, ranks and helpers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tests.faults.processes import command_line, marked

_FORK_SERVER = "multiprocessing.forkserver"


def _with_parents() -> Iterator[tuple[int, int]]:
    """Process id and parent of all processes that have not ended."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, parent, *_ = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            if state not in "ZX":
                yield int(name), int(parent)


def fork_server_of(server: int) -> int | None:
    """The fork server of the server with that process id; None if it has none now."""
    for pid, parent in _with_parents():
        if parent == server and _FORK_SERVER in command_line(pid):
            return pid
    return None


def ranks_of(server: int) -> list[int]:
    """The ranks of the server with that process id, which its fork server has started."""
    fork_server = fork_server_of(server)
    return sorted(pid for pid, parent in _with_parents() if parent == fork_server)


def belonging(mark: str, folder: Path) -> list[int]:
    """All processes of a server, by their environment or by a file of `folder` in their arguments.

    The process that decodes a photograph does not inherit the environment.
    """
    found = set(marked(mark))
    found |= {pid for pid, _ in _with_parents() if str(folder) in command_line(pid)}
    return sorted(found - {os.getpid()})


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, of all its threads, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
