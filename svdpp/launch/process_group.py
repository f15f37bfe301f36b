"""Process group of the ranks: choice of backend and network interface, store, join and leave."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from loguru import logger

from svdpp.comm.transport import GROUP_TIMEOUT
from svdpp.errors import BrokenLinkError, RankError, RequestError, first_line, pluralize
from svdpp.launch.world import World, store_address

# Longest time in seconds for leaving the group before a rank exits. The parent must allow a rank
# more time than this to exit.
_LEAVE_SECONDS = 20.0

#: Open stores (`dist.Store`) of this process, by world, host and port.
_stores: dict[tuple[World, str, int], dist.Store] = {}


def choose_backend(
    device: str, world_size: int, environment: Mapping[str, str] = os.environ
) -> str:
    """Return the backend of the process group: PIPELINE_BACKEND, or a default for the device.

    Args:
        device: `cpu`, `cuda` (each rank has its own GPU) or `cuda:N` (all ranks share one GPU).
        world_size: Number of ranks.
        environment: Environment variables; PIPELINE_BACKEND is read.

    Returns:
        `nccl` or `gloo`. The default is `nccl` if each rank has its own GPU, else `gloo`.

    Raises:
        RequestError: PIPELINE_BACKEND is neither `nccl` nor `gloo`, or it is `nccl` and the ranks
            use the CPU or share one GPU.
    """
    own_device = device == "cuda"
    backend = environment.get("PIPELINE_BACKEND") or ("nccl" if own_device else "gloo")
    if backend not in ("gloo", "nccl"):
        raise RequestError(
            f"PIPELINE_BACKEND must be gloo or nccl, got {backend!r}", details={"backend": backend}
        )
    if backend == "nccl" and not own_device and (device == "cpu" or world_size > 1):
        raise RequestError(
            f"PIPELINE_BACKEND=nccl needs one GPU for each rank, but `world_size` is {world_size} "
            f"and `device` is {device}",
            "unset PIPELINE_BACKEND, so that ranks that share a device use gloo",
            details={"backend": backend, "world_size": world_size, "device": device},
        )
    return backend


def device_of_rank(device: str, world: World) -> str:
    """Return the device of a rank: `cuda` becomes `cuda:N`, where N is the local rank.

    N is 0 if only one GPU is visible to each process, as under Slurm with `--gpus-per-task=1`.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.
        world: World of the rank.
    """
    if device != "cuda":
        return device
    sees_own_gpu_only = world.local_size > 1 and torch.cuda.device_count() == 1
    return "cuda:0" if sees_own_gpu_only else f"cuda:{world.local_rank}"


def join_file_store(world: World, backend: str, store_file: Path) -> None:
    """Join the process group (`torch.distributed`) of ranks on this machine through a file store.

    torch's TCP store is not used, because it would listen on every network interface.

    Args:
        world: Number of the rank, number of ranks, and host of the rank.
        backend: `gloo` or `nccl`.
        store_file: Path of a file that does not exist before the run, in a folder that only this
            user can open.

    Raises:
        BrokenLinkError: Another rank cannot be reached.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(store_file), world.size)
    _join(world, backend, store)


def open_store(world: World, timeout: float) -> tuple[str, dist.Store]:
    """Return this host's address, and the store (`dist.Store`) through which ranks find each other.

    The launcher or rank 0 serves the store. The store stays open, because later process groups of
    this process use it too. Only one thread at a time may use the store.

    Args:
        world: Number of the rank, number of ranks, and host of the rank.
        timeout: Longest time in seconds to wait until the store is open, and in each later wait.

    Raises:
        RequestError: The store's address is unknown, or other hosts could not reach this host.
        RankError: The store cannot be reached.
    """
    host, port = store_address()
    address = choose_interface(host, spans_hosts=world.spans_hosts)
    wait, key = timedelta(seconds=timeout), (world, host, port)
    try:
        if key not in _stores and world.owns_store and world.rank == 0:
            _stores[key] = _own_store(address, port, wait)
        elif key not in _stores:
            _stores[key] = dist.TCPStore(host, port, timeout=wait)
        _stores[key].set_timeout(wait)
        return address, _stores[key]
    except (OSError, RuntimeError) as error:
        raise RankError(
            f"rank {world.rank} ({socket.gethostname()}) cannot reach the store at {host}:{port}: "
            f"{first_line(error)}",
            "set MASTER_ADDR and MASTER_PORT to address and port of rank 0, and open the port in "
            "the firewall of its host",
            details={"rank": world.rank, "address": host, "port": port, "reason": str(error)},
        ) from error


def _own_store(address: str, port: int, wait: timedelta) -> dist.Store:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        timeout=wait,
        wait_for_workers=False,
        # The store gets this socket, because its own socket would listen on all addresses. The
        # libuv server cannot take a socket (torch 2.13), so it is switched off.
        master_listen_fd=listener.detach(),
        use_libuv=False,
    )


def join_store(world: World, backend: str, store: dist.Store, token: str) -> None:
    """Join the process group of the ranks with the same `token`, through an open store.

    The token is the prefix of the run's keys in the store. Each run needs its own token, because a
    launcher keeps the store when it restarts the ranks.

    Args:
        world: Number of the rank, number of ranks, and host of the rank.
        backend: `gloo` or `nccl`.
        store: Store that `open_store` returned.
        token: Token of the run; see `rendezvous.Endpoint`.

    Raises:
        BrokenLinkError: Another rank cannot be reached.
    """
    _join(world, backend, dist.PrefixStore(f"svdpp/{token}", store))


def _join(world: World, backend: str, store: dist.Store) -> None:
    try:
        # With NCCL, the group also has a backend for the CPU, because the headers of packets are
        # CPU tensors, which NCCL cannot send.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=GROUP_TIMEOUT,
        )
    except RuntimeError as error:
        reason = first_line(error)
        raise BrokenLinkError(
            f"could not connect to the other ranks: {reason}",
            details={"rank": world.rank, "world_size": world.size, "reason": reason},
        ) from error


def destroy(timeout: float = _LEAVE_SECONDS) -> None:
    """Leave the `torch.distributed` process group of the ranks.

    Call this only after all packets have been received. Two ranks that close their communicators in
    different orders may wait for each other forever in `ncclCommDestroy` (vllm-project/vllm#39846).
    So this function waits for at most `timeout` seconds; then it logs a warning and returns.

    Args:
        timeout: Seconds to wait for the other ranks.
    """
    if not dist.is_initialized():
        return
    thread = threading.Thread(target=dist.destroy_process_group, name="leave", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        logger.warning("the process group did not close within {:.0f} s", timeout)


def check_devices(device: str, local_size: int, *, launched: bool = False) -> None:
    """Raise a `RequestError` if a run's CUDA devices do not exist.

    The check creates no CUDA context.

    Args:
        device: `cpu`, `cuda` (each rank has its own GPU) or `cuda:N`.
        local_size: Number of ranks on this host.
        launched: Whether a launcher started the ranks. It may have made one GPU visible to each
            rank, so one visible GPU is then enough for `cuda`.

    Raises:
        RequestError: The machine has too few CUDA devices.
    """
    if device == "cpu":
        return
    count = torch.cuda.device_count()
    needed = local_size if device == "cuda" else int(device.partition(":")[2]) + 1
    if device == "cuda" and launched and count == 1:
        # The launcher may have made a different GPU visible to each rank. A later check compares
        # the UUIDs of the GPUs, and so finds two ranks on the same GPU.
        return
    if count < needed:
        wanted = pluralize(needed, "CUDA device") if device == "cuda" else f"device {device}"
        raise RequestError(
            f"{wanted} requested, {count} found",
            "use `device` cpu and `model` demo to try svdpp without a GPU"
            if count == 0
            else f"use `world_size` {count} or fewer, or use `device` cuda:0 to share one GPU",
            details={"device": device, "asked": needed, "found": count},
        )


def choose_interface(
    peer: str, *, spans_hosts: bool, environment: MutableMapping[str, str] = os.environ
) -> str:
    """Choose the network interface for gloo and NCCL; return the interface's address.

    The user can name the interface in GLOO_SOCKET_IFNAME. By default, the interface through which
    `peer` is reached is used.

    Args:
        peer: Name or address of the store's host.
        spans_hosts: Whether the world has ranks on several hosts.
        environment: Environment variables, to which the name of the interface is added.

    Raises:
        RequestError: The interface in GLOO_SOCKET_IFNAME does not exist, `peer` cannot be reached,
            or other hosts could not reach the address.
    """
    addresses = _addresses()
    others = ", ".join(dict.fromkeys(name for name, _ in addresses if name != "lo"))
    name, source = environment.get("GLOO_SOCKET_IFNAME", "").partition(",")[0], ""
    if name:
        address = next((each for interface, each in addresses if interface == name), "")
    else:
        address, source = _address_towards(peer), f" (the address for {peer!r})"
    if not address:
        raise RequestError(
            f"GLOO_SOCKET_IFNAME names {name!r}, which is not an interface of "
            f"{socket.gethostname()} with an IP address",
            f"set GLOO_SOCKET_IFNAME to one of {others or 'lo'}",
            details={"interface": name},
        )
    is_loopback = ipaddress.ip_address(address).is_loopback
    # A loopback address is fine if the store has a loopback address too, because then all ranks are
    # on this machine.
    if spans_hosts and is_loopback and not _is_loopback(peer):
        raise RequestError(
            f"{socket.gethostname()} would use {address}, which other hosts cannot reach{source}",
            "set GLOO_SOCKET_IFNAME to the interface of the network between the hosts: "
            + (others or "(this host has none)"),
            details={"address": address, "peer": peer},
        )
    if not name:
        name = "lo" if is_loopback else next((n for n, each in addresses if each == address), "")
    if name:
        environment["GLOO_SOCKET_IFNAME"] = name
        environment.setdefault("NCCL_SOCKET_IFNAME", name)
    return address


def _is_loopback(peer: str) -> bool:
    """Whether `peer` is `localhost` or a loopback address. Host names are not resolved."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(peer).is_loopback
    return peer == "localhost"


def _address_towards(peer: str) -> str:
    """Return this host's source address for packets to `peer`, without sending a packet."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            peer, 9, type=socket.SOCK_DGRAM, flags=socket.AI_ADDRCONFIG
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RequestError(
            f"{socket.gethostname()} cannot reach {peer!r}: {error.strerror}",
            "set MASTER_ADDR to a name or address that every host can resolve",
            details={"peer": peer},
        ) from error


def _addresses() -> list[tuple[str, str]]:
    """Return (interface, address) pairs of this host, without link-local addresses.

    For each interface, IPv4 addresses come first.
    """
    found = []
    for name, entries in psutil.net_if_addrs().items():
        for family in (socket.AF_INET, socket.AF_INET6):
            addresses = [entry.address for entry in entries if entry.family == family]
            found += [(name, address) for address in addresses if "%" not in address]
    return found
