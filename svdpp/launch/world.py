"""Owns this process's place among ranks that others have started: the only reader of the variables
of torchrun and Slurm. Knows no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from svdpp.errors import RequestError

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
# torch's own default, and the room in which a job's number moves it, so that two jobs of one user
# on one host do not meet.
_FIRST_PORT, _NUM_PORTS = 29500, 10_000


@dataclass(frozen=True, kw_only=True)
class World:
    """One process's place among the ranks.

    Args:
        rank: counted over all hosts.
        local_rank: counted on this host, and so the number of its GPU.
        size: number of ranks on all hosts.
        local_size: number of ranks on this host.
        host: index of this host; that of rank 0 is 0.
        num_hosts: number of hosts.
        is_even: False where a host is known to have another number of ranks than others.
        launcher: who has started the ranks; None for those of one command on one machine.
        restarts: how often torchrun has started this host's ranks anew.
        owns_store: whether the store is rank 0's own rather than the launcher's.
    """

    rank: int
    local_rank: int
    size: int
    local_size: int
    host: int = 0
    num_hosts: int = 1
    is_even: bool = True
    launcher: Literal["torchrun", "slurm"] | None = None
    restarts: int = 0
    owns_store: bool = False

    @property
    def is_member(self) -> bool:
        """Whether this is a rank other than 0 that somebody else has started."""
        return self.launcher is not None and self.rank != 0

    @property
    def on_first_host(self) -> bool:
        """Whether rank 0 is on this host."""
        return self.host == 0

    @property
    def ranks_per_host(self) -> int | None:
        """Ranks on each of several hosts; None on one, or where hosts have different numbers."""
        is_even = self.is_even and self.local_size * self.num_hosts == self.size
        return self.local_size if is_even and self.num_hosts > 1 else None

    @property
    def spans_hosts(self) -> bool:
        """Whether there are ranks on other hosts."""
        return self.local_size < self.size


def find_world(environment: Mapping[str, str] = os.environ) -> World | None:
    """The world that torchrun, or anything that sets its variables, or srun has put us in.

    In a batch script outside srun, and in an srun of one task, there is none: a command starts its
    own ranks there.

    Returns:
        None where nobody has.

    Raises:
        RequestError: only some of the variables are set, or they are not numbers of a world.
    """
    if any(name in environment for name in _TORCHRUN):
        return _torchrun_world(environment)
    if "SLURM_STEP_ID" in environment and environment.get("SLURM_NTASKS", "1") != "1":
        return _slurm_world(environment)
    return None


def was_launched() -> bool:
    """Whether others have started this process as one of several."""
    try:
        return find_world() is not None
    except RequestError:
        return True


def store_address(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port of the store through which the ranks meet.

    MASTER_ADDR and MASTER_PORT, which torchrun sets; under Slurm, where they are not set, the
    job's first host and a port by the job's number.

    Raises:
        RequestError: nothing says where it is, or the port is no number.
    """
    host = environment.get("MASTER_ADDR") or _first_slurm_host(environment)
    if not host:
        raise RequestError(
            "MASTER_ADDR is not set: the ranks cannot find each other",
            "start with torchrun or srun, or set MASTER_ADDR and MASTER_PORT to rank 0's",
        )
    job = environment.get("SLURM_JOB_ID", "")
    offset = int(job) % _NUM_PORTS if job.isascii() and job.isdecimal() else 0
    port = environment.get("MASTER_PORT") or str(_FIRST_PORT + offset)
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65_536):
        raise RequestError(f"MASTER_PORT must be a port's number, got {port!r}")
    return host, int(port)


def _torchrun_world(environment: Mapping[str, str]) -> World:
    rank, local_rank, size = _numbers(environment, _TORCHRUN, "torchrun")
    local_size = _number(environment, "LOCAL_WORLD_SIZE", size)
    return _checked(
        World(
            rank=rank,
            local_rank=local_rank,
            size=size,
            local_size=local_size,
            host=_number(environment, "GROUP_RANK", rank // max(local_size, 1)),
            num_hosts=_number(environment, "GROUP_WORLD_SIZE", -(-size // max(local_size, 1))),
            launcher="torchrun",
            restarts=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
            owns_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        ),
        {name: environment[name] for name in _TORCHRUN},
    )


def _slurm_world(environment: Mapping[str, str]) -> World:
    rank, local_rank, size = _numbers(environment, _SLURM, "Slurm")
    tasks, host = _tasks_by_host(environment), _number(environment, "SLURM_NODEID", 0)
    return _checked(
        World(
            rank=rank,
            local_rank=local_rank,
            size=size,
            local_size=tasks[host] if host < len(tasks) else size,
            host=host,
            num_hosts=_number(environment, "SLURM_STEP_NUM_NODES", 1),
            is_even=len(set(tasks)) <= 1,
            launcher="slurm",
            restarts=_number(environment, "SLURM_RESTART_COUNT", 0),
            owns_store=True,
        ),
        {name: environment[name] for name in _SLURM},
    )


def _tasks_by_host(environment: Mapping[str, str]) -> list[int]:
    """Tasks of this step on each host: SLURM_STEP_TASKS_PER_NODE is such as `4(x2),3`."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part, re.ASCII):
            counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_slurm_host(environment: Mapping[str, str]) -> str:
    """`n1` of `n[1-4,7],m2`; a list is of hosts with a common beginning, ranges keep zeros."""
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", hosts)
    return match[1] + (match[2] or "") if match else ""


def _numbers(environment: Mapping[str, str], names: tuple[str, ...], who: str) -> list[int]:
    values = {name: environment[name] for name in names if name in environment}
    missing = [name for name in names if name not in values]
    if missing:
        raise RequestError(
            f"{', '.join(values)} set but {', '.join(missing)} not: this is no {who} world",
            f"start with {'srun' if who == 'Slurm' else who}, or unset {' '.join(values)}",
        )
    if not all(value.isascii() and value.isdecimal() for value in values.values()):
        raise RequestError(f"not a {who} world: {values}")
    return [int(value) for value in values.values()]


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, "")
    return int(value) if value.isascii() and value.isdecimal() else default


def _checked(world: World, values: Mapping[str, str]) -> World:
    if not (world.rank < world.size and world.local_rank < world.local_size <= world.size):
        who = "torchrun" if world.launcher == "torchrun" else "Slurm"
        raise RequestError(f"not a {who} world: {dict(values)}")
    return world
