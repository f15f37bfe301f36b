"""Owns joining and leaving the world of ranks; the only reader of RANK, LOCAL_RANK, WORLD_SIZE
and PIPELINE_BACKEND."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from svdpp.errors import RequestError

# Stalls are found by heartbeats, which name the rank that stands still; this timeout would name
# its waiting neighbour, and a rank that computes for longer would lose the pair (gloo closes it).
GROUP_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True)
class World:
    """One process's place among the ranks."""

    rank: int
    local_rank: int
    world_size: int


def torchrun_world(environment: Mapping[str, str] = os.environ) -> World | None:
    """The world that torchrun (or anything that sets its variables) has put this process in.

    Returns:
        None where none of RANK, LOCAL_RANK and WORLD_SIZE is set.

    Raises:
        RequestError: only some of them are set, or they are not numbers of a world.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    values = {name: environment[name] for name in names if name in environment}
    if not values:
        return None
    missing = [name for name in names if name not in values]
    if missing:
        raise RequestError(
            f"{', '.join(values)} set but {', '.join(missing)} not: this is no torchrun world",
            f"start with torchrun, or unset {' '.join(values)}",
        )
    if not all(value.isascii() and value.isdecimal() for value in values.values()):
        raise RequestError(f"not a torchrun world: {values}")
    world = World(*(int(values[name]) for name in names))
    if not (world.rank < world.world_size and world.local_rank < world.world_size):
        raise RequestError(f"not a torchrun world: {values}")
    return world


def choose_backend(
    device: str, world_size: int, environment: Mapping[str, str] = os.environ
) -> str:
    """`nccl` where each rank has a CUDA device of its own, else `gloo`; PIPELINE_BACKEND overrides.

    Raises:
        RequestError: the backend asked for cannot carry latents on that device.
    """
    own_device = device == "cuda"
    backend = environment.get("PIPELINE_BACKEND") or ("nccl" if own_device else "gloo")
    if backend not in ("gloo", "nccl"):
        raise RequestError(f"PIPELINE_BACKEND must be gloo or nccl, got {backend!r}")
    if backend == "nccl" and device == "cpu":
        raise RequestError(
            "PIPELINE_BACKEND=nccl cannot carry latents between CPU ranks",
            "unset PIPELINE_BACKEND, or use --device cuda",
        )
    if backend == "nccl" and not own_device and world_size > 1:
        raise RequestError(
            f"PIPELINE_BACKEND=nccl cannot join {world_size} ranks that share {device}",
            "unset PIPELINE_BACKEND: ranks on a shared device use gloo",
        )
    return backend


def device_of_rank(device: str, local_rank: int) -> str:
    """The device of one rank: `cuda` becomes `cuda:<local rank>`, anything else stays."""
    return f"cuda:{local_rank}" if device == "cuda" else device


def join_file_store(world: World, backend: str, store_file: Path) -> None:
    """Joins ranks started on this machine, over a store file in a folder nobody else can open.

    Nothing listens beyond loopback: a TCP store would listen on every interface, whatever
    GLOO_SOCKET_IFNAME says. The file must be new for each run, since gloo fails on a used one.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(store_file), world.world_size)
    _join(world, backend, store)


def join_torchrun(world: World, backend: str) -> None:
    """Joins torchrun's world over its own TCP store."""
    _join(world, backend, None)


def torchrun_store() -> dist.Store:
    """A new client of torchrun's store, for the messages between the ranks and rank 0.

    A client of its own for each user: a blocking call on a shared one holds up all others.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False)


def _join(world: World, backend: str, store: dist.Store | None) -> None:
    # Headers are CPU tensors under both backends: one group, each tensor by its own device.
    name = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
    if store is None:
        dist.init_process_group(name, init_method="env://", timeout=GROUP_TIMEOUT)
    else:
        dist.init_process_group(
            name,
            store=store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=GROUP_TIMEOUT,
        )


def leave() -> None:
    """Leaves the world. Called when every send has been received: it closes all connections."""
    if dist.is_initialized():
        dist.destroy_process_group()


def check_devices(device: str, world_size: int) -> None:
    """Checks that the CUDA devices a run needs are there, without starting CUDA on them.

    Raises:
        RequestError: naming how many there are.
    """
    if device == "cpu":
        return
    count = torch.cuda.device_count()
    needed = world_size if device == "cuda" else int(device.partition(":")[2]) + 1
    if count < needed:
        plural = "s" if needed > 1 else ""
        what = f"{needed} CUDA device{plural}" if device == "cuda" else f"device {device}"
        raise RequestError(
            f"{what} asked for, {count} found",
            "use --device cpu --model demo to try the tool without a GPU"
            if count == 0
            else f"use --gpus {count} or fewer, or --device cuda:0 to share one",
        )
