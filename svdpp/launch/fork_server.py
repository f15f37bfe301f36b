"""Owns the fork server of CPU ranks: what it imports, once for all, and its start. Knows no torch.

Importing torch and diffusers is the longest part of a start. It happens in the server, beside what
the command itself has to do, if the server is started first. Ranks on CUDA are started by `spawn`
instead: importing diffusers initialises CUDA, and a process forked afterwards cannot use it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker

from svdpp.launch import environment, fork_server_preload
from svdpp.launch.process_lifetime import signals_held
from svdpp.launch.world import find_world

#: What ranks import: the engine, and SVD if they run it.
ENGINE = "svdpp.worker.rank"
SVD = "svdpp.models.svd.model"


def start_method(device: str) -> str:
    """How ranks on `device` are started."""
    return "spawn" if device.startswith("cuda") else "forkserver"


def start(preload: Sequence[str]) -> None:
    """Starts the server unless it runs, and does not wait for its imports.

    Args:
        preload: modules that it imports; without effect if it runs already.
    """
    environment.set_defaults()
    resource_tracker.ensure_running()  # it would let signals through again
    forkserver.set_forkserver_preload([fork_server_preload.__name__])
    os.environ[fork_server_preload.STARTER] = str(os.getpid())
    os.environ[fork_server_preload.MODULES] = ",".join(preload)
    with signals_held():
        forkserver.ensure_running()
    del os.environ[fork_server_preload.STARTER], os.environ[fork_server_preload.MODULES]


def start_early(*, svd: bool, device: str) -> None:
    """`start`, before a command imports torch for itself; only for ranks that it will fork.

    Args:
        svd: whether the ranks run SVD rather than the dummy model.
        device: of the ranks.
    """
    environment.set_defaults()
    if find_world() is None and start_method(device) == "forkserver":
        start([ENGINE, SVD] if svd else [ENGINE])
