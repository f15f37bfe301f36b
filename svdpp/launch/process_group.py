"""Owns joining and leaving the world of ranks; the only reader of PIPELINE_BACKEND."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from svdpp.errors import RankError, RequestError
from svdpp.launch import network
from svdpp.launch.world import World, store_address

# Stalls are found by heartbeats, which name the rank that stands still; this timeout would name
# its waiting neighbour, and a rank that computes for longer would lose the pair (gloo closes it).
GROUP_TIMEOUT = timedelta(days=7)

#: By who looks for it, and where.
_stores: dict[tuple[World, str, int], dist.Store] = {}


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
    store = dist.FileStore(str(store_file), world.size)
    _join(world, backend, store)


def open_store(world: World, timeout: float) -> tuple[str, dist.Store]:
    """This host's address, and the store by which ranks meet, for one thread at a time.

    The launcher's. Where it has none, rank 0 makes one, which listens on the address alone. It
    stays open: groups of ranks that follow each other in one process meet by the same.

    Args:
        world: of this rank.
        timeout: seconds to reach it.

    Raises:
        RequestError: nothing says where it is, or no address of this host's leads there.
        RankError: it cannot be reached, or made.
    """
    host, port = store_address()
    address = network.choose_interface(host, spans_hosts=world.spans_hosts)
    try:
        return address, _store(world, host, port, address, timeout)
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RankError(
            f"rank {world.rank} ({socket.gethostname()}) cannot reach the store at {host}:{port}: "
            f"{reason}",
            "MASTER_ADDR and MASTER_PORT must be rank 0's, and its firewall must let them through",
        ) from error


def _store(world: World, host: str, port: int, address: str, timeout: float) -> dist.Store:
    wait, key = timedelta(seconds=timeout), (world, host, port)
    if key in _stores:
        _stores[key].set_timeout(wait)
    elif world.owns_store and world.rank == 0:
        _stores[key] = _own_store(address, port, wait)
    else:
        _stores[key] = dist.TCPStore(host, port, is_master=False, timeout=wait)
    return _stores[key]


def _own_store(address: str, port: int, wait: timedelta) -> dist.Store:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        timeout=wait,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # else it would listen on all addresses
        use_libuv=False,  # which takes no listener of somebody else's (torch 2.13)
    )


def join_store(world: World, backend: str, store: dist.Store, token: str) -> None:
    """Joins ranks that have agreed on `token`, by which they use the store.

    Under one of their own, since a launcher that starts ranks again keeps what is in its store.
    """
    _join(world, backend, dist.PrefixStore(f"svdpp/{token}", store))


def _join(world: World, backend: str, store: dist.Store) -> None:
    # Headers are CPU tensors under both backends: one group, each tensor by its own device.
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=GROUP_TIMEOUT,
    )


def destroy() -> None:
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
            details={"asked": needed, "found": count},
        )
