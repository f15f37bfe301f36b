"""Rank and world size that a launcher (torchrun or srun) gives this process.

Only this module reads the environment variables of torchrun and Slurm. It does not import torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeGuard

from svdpp.errors import RequestError

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
# Default port of the store under Slurm: torch's default plus the job id (modulo the number of
# ports), so that jobs on one host use different ports.
_FIRST_PORT, _NUM_PORTS = 29500, 10_000


@dataclass(frozen=True, kw_only=True)
class World:
    """Rank of a process, and numbers of ranks and hosts in its world (all ranks of the run).

    Without a launcher, one svdpp command starts all ranks on one machine.
    """

    rank: int
    local_rank: int
    """Index of the rank among the ranks of its host, from 0. It is also the index of the rank's
    GPU, unless the launcher has made only one GPU visible to each rank."""
    size: int
    """Number of ranks on all hosts."""
    local_size: int
    """Number of ranks on the rank's host."""
    host: int = 0
    """Index of the rank's host, from 0."""
    num_hosts: int = 1
    is_even: bool = True
    """Whether all hosts have the same number of ranks. True if the launcher does not tell how many
    ranks each host has."""
    launcher: Literal["torchrun", "slurm"] | None = None
    """Launcher that started the process; None: svdpp itself started it."""
    restarts: int = 0
    """Number of times that the launcher has restarted the ranks."""
    owns_store: bool = False
    """Whether rank 0 creates the store, because the launcher does not provide one."""

    @property
    def on_first_host(self) -> bool:
        """Whether a rank runs on the same host as rank 0."""
        return self.host == 0

    @property
    def ranks_per_host(self) -> int | None:
        """Number of ranks on each host; None if there is one host, or if the numbers differ."""
        is_even = self.is_even and self.local_size * self.num_hosts == self.size
        return self.local_size if is_even and self.num_hosts > 1 else None

    @property
    def spans_hosts(self) -> bool:
        """Whether the world has ranks on several hosts."""
        return self.local_size < self.size


def find_world(environment: Mapping[str, str] = os.environ) -> World | None:
    """Return the world that a launcher (torchrun, a similar program, or srun) gives this process.

    Args:
        environment: Environment variables.

    Returns:
        World; None if no launcher started the process. A batch script that runs without srun, and
        an srun with one task, do not count as launchers.

    Raises:
        RequestError: The launcher's environment variables are not numbers, or contradict each
            other.
    """
    if any(name in environment for name in _TORCHRUN):
        world = _torchrun_world(environment)
    elif "SLURM_STEP_ID" in environment and environment.get("SLURM_NTASKS", "1") != "1":
        world = _slurm_world(environment)
    else:
        return None
    if not (world.rank < world.size and world.local_rank < world.local_size <= world.size):
        raise RequestError(
            f"invalid {world.launcher} environment: rank {world.rank} of {world.size}, "
            f"local rank {world.local_rank} of {world.local_size}",
            details={
                **{"rank": world.rank, "world_size": world.size},
                **{"local_rank": world.local_rank, "local_size": world.local_size},
            },
        )
    return world


def is_secondary_rank(launched: World | None) -> TypeGuard[World]:
    """Whether a launcher started this process, and its rank is not 0.

    Args:
        launched: Result of `find_world`.
    """
    return launched is not None and launched.launcher is not None and launched.rank != 0


def was_launched() -> bool:
    """Whether a launcher started this process, even if its environment variables are invalid."""
    try:
        return find_world() is not None
    except RequestError:
        return True


def store_address(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return host and port of the ranks' store, from the variables MASTER_ADDR and MASTER_PORT.

    torchrun sets both variables. Under Slurm, the defaults are the job's first host, and a port
    that depends on the job id.

    Args:
        environment: Environment variables.

    Raises:
        RequestError: MASTER_ADDR and Slurm's list of hosts are missing, or MASTER_PORT is not a
            port number.
    """
    host = environment.get("MASTER_ADDR") or _first_slurm_host(environment)
    if not host:
        raise RequestError(
            "MASTER_ADDR is not set: the ranks cannot find each other",
            "start with torchrun or srun, or set MASTER_ADDR and MASTER_PORT to address and port "
            "of rank 0",
        )
    job = environment.get("SLURM_JOB_ID", "")
    offset = int(job) % _NUM_PORTS if job.isascii() and job.isdecimal() else 0
    port = environment.get("MASTER_PORT") or str(_FIRST_PORT + offset)
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65_536):
        raise RequestError(
            f"MASTER_PORT must be a port number, got {port!r}", details={"MASTER_PORT": port}
        )
    return host, int(port)


def _torchrun_world(environment: Mapping[str, str]) -> World:
    rank, local_rank, size = _numbers(environment, _TORCHRUN, "torchrun")
    local_size = _number(environment, "LOCAL_WORLD_SIZE", size)
    return World(
        rank=rank,
        local_rank=local_rank,
        size=size,
        local_size=local_size,
        host=_number(environment, "GROUP_RANK", rank // max(local_size, 1)),
        num_hosts=_number(environment, "GROUP_WORLD_SIZE", -(-size // max(local_size, 1))),
        launcher="torchrun",
        restarts=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
        owns_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )


def _slurm_world(environment: Mapping[str, str]) -> World:
    rank, local_rank, size = _numbers(environment, _SLURM, "Slurm")
    tasks, host = _tasks_by_host(environment), _number(environment, "SLURM_NODEID", 0)
    return World(
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
    )


def _tasks_by_host(environment: Mapping[str, str]) -> list[int]:
    """Return the number of tasks on each host, from SLURM_STEP_TASKS_PER_NODE such as `4(x2),3`."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part, re.ASCII):
            counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_slurm_host(environment: Mapping[str, str]) -> str:
    """Return the first host of a Slurm node list: `n1` for `n[1-4,7],m2`, `n07` for `n[07-09]`."""
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", hosts)
    return match[1] + (match[2] or "") if match else ""


def _numbers(environment: Mapping[str, str], names: tuple[str, ...], launcher: str) -> list[int]:
    values = {name: environment.get(name, "") for name in names}
    if not all(value.isascii() and value.isdecimal() for value in values.values()):
        raise RequestError(
            f"invalid {launcher} environment: {values}",
            f"start with {'srun' if launcher == 'Slurm' else launcher}, or unset the variables",
            details=values,
        )
    return [int(value) for value in values.values()]


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, "")
    return int(value) if value.isascii() and value.isdecimal() else default
