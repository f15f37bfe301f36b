"""Owns the start of the fork server, and the modules it imports once for all CPU ranks; no torch.

Importing torch and diffusers takes most of the time of a start. A command that starts the server
first goes on while the server imports them. Ranks on CUDA are started by `spawn` instead: importing
diffusers initialises CUDA, and a process forked afterwards cannot use it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util

from svdpp.launch import environment, fork_server_preload
from svdpp.launch.process_lifetime import signals_blocked
from svdpp.models.checkpoint import package_of

#: Imported for all ranks.
RANK_MODULE = "svdpp.worker.rank"


def start_method(device: str) -> str:
    """The multiprocessing start method for ranks on `device`."""
    return "spawn" if device.startswith("cuda") else "forkserver"


def start(preload: Sequence[str]) -> None:
    """Starts the server unless it is running; does not wait for its imports.

    Args:
        preload: modules for the server to import; ignored if it is running.
    """
    resource_tracker.ensure_running()  # first, because starting it unblocks the signals
    forkserver.set_forkserver_preload([fork_server_preload.__name__])
    modules = {
        fork_server_preload.STARTER: str(os.getpid()),
        fork_server_preload.FOLDER: util.get_temp_dir(),
        fork_server_preload.MODULES: ",".join(preload),
    }
    with environment.defaults(modules), signals_blocked():
        forkserver.ensure_running()


def modules_for(family: str | None) -> list[str]:
    """The modules that ranks need; `family` is that of their model, None for the dummy model."""
    return [RANK_MODULE, *([] if family is None else [f"{package_of(family)}.family"])]


def start_early(*, family: str | None, device: str) -> None:
    """Starts the server before the command itself imports torch, if its ranks will be forked.

    Only for ranks that this process will start, and no launcher.

    Args:
        family: of the ranks' model; None for the dummy model.
        device: of the ranks.
    """
    if start_method(device) == "forkserver":
        start(modules_for(family))
