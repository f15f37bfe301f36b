"""Started ranks end with their parent, print to a file, and listen on loopback only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from svdpp.launch.group import RankContext
from svdpp.launch.started import StartedGroup
from tests.processes import run_ranks

pytestmark = pytest.mark.processes

# A parent whose ranks all block in a receive without a matching send.
WAITING_PARENT = """
import sys, time
from tests.launch import test_started
from svdpp.launch.started import StartedGroup

if __name__ == "__main__":
    group = StartedGroup(test_started.wait_in_receive, None, world_size=3, backend="gloo")
    joined = set()
    while len(joined) < 3:
        joined.update(rank for rank, _ in group.poll(1))
    print(group._folder, *group.pids, flush=True)
    time.sleep(600)
"""


def wait_in_receive(context: RankContext, _argument: object) -> None:
    import torch
    import torch.distributed as dist

    context.join()
    context.channel.send(b"joined")
    dist.recv(torch.zeros(1), (context.world.rank + 1) % context.world.size)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_ranks_blocked_in_a_receive_die_with_their_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", WAITING_PARENT], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    folder, *fields = parent.stdout.readline().split()
    pids = [int(field) for field in fields]
    assert len(pids) == 3
    assert all(map(_alive, pids))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 5
    while any(map(_alive, pids)):
        assert time.monotonic() < deadline, "ranks outlived their parent"
        time.sleep(0.05)
    assert not Path(folder).exists()


def _listeners(context: RankContext) -> list[str]:
    context.join()
    rows = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # TCP_LISTEN
                rows.append((fields[9], fields[1].partition(":")[0]))
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_fd(fd)}
    return [address for inode, address in rows if f"socket:[{inode}]" in own]


def _is_fd(name: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{name}")


def test_ranks_listen_on_loopback_only() -> None:
    loopback = {"0100007F", "00000000000000000000000001000000"}
    listeners = run_ranks(_listeners, 2)
    assert all(listeners), "gloo must listen somewhere, so the test itself is wrong"
    assert {address for addresses in listeners for address in addresses} <= loopback


def _print_and_fail(context: RankContext, _argument: object) -> None:
    print(f"printed by rank {context.world.rank}")
    os.write(2, b"written without Python\n")
    raise ValueError("on purpose")


def test_the_output_of_ranks_is_kept_off_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    group = StartedGroup(_print_and_fail, None, world_size=2, backend="gloo")
    assert not group.end(60)
    output = group.output_tail(1) or ""
    group.kill()
    assert group.exited() == {0: 1, 1: 1}
    assert "printed by rank 1" in output
    assert "written without Python" in output
    assert "ValueError: on purpose" in output
    captured = capfd.readouterr()
    assert "printed by" not in captured.out + captured.err
