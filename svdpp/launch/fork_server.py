"""Fork server of CPU ranks, which imports torch and the model's classes once for all of them.

This module does not import torch, so that a command can start the server before it imports torch
itself. The server is multiprocessing's own. It would wait forever for a stopped rank, and would not
notice the end of its starter during imports. It therefore imports this module first, which asks the
kernel for a signal when the starter ends.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from types import TracebackType

from svdpp.launch import process_lifetime
from svdpp.launch.start_deadline import end_fork_server, limit_error

#: Modules that the server imports: for all ranks, and for ranks that load a model.
RANK_MODULE = "svdpp.worker.rank"
_MODEL_MODULE = "svdpp.models.engine.load"

#: Environment variable of the server: process id and temporary folder of its starter, and modules.
_TASK = "SVDPP_FORK_SERVER"
_WAIT_SECONDS = 1.0


def start_method(device: str) -> str:
    """Return the multiprocessing start method for ranks on `device`.

    Importing diffusers initialises CUDA, and a process forked afterwards cannot use it.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.

    Returns:
        `forkserver` for CPU ranks, `spawn` for others.
    """
    return "spawn" if device.startswith("cuda") else "forkserver"


def start_fork_server(preload: Sequence[str]) -> None:
    """Start the server unless it is running; do not wait for its imports.

    Args:
        preload: Modules that the server imports; see `modules_for`.

    Raises:
        OutputError: No folder for temporary files can be written.
    """
    end_fork_server(only_if_stopped=True)
    _end_server_at_exit()
    resource_tracker.ensure_running()  # first, because its start unblocks the signals
    forkserver.set_forkserver_preload([__name__])
    task = json.dumps([os.getpid(), process_lifetime.temp_dir(), *preload])
    with process_lifetime.environment_defaults({_TASK: task}), process_lifetime.signals_blocked():
        forkserver.ensure_running()


@functools.cache
def _end_server_at_exit() -> None:
    # Otherwise a stopped server would not end with this process.
    atexit.register(end_fork_server)


def modules_for(family: str | None) -> list[str]:
    """Return the modules that ranks need, for `preload` of `start_ranks`.

    Args:
        family: Family of the ranks' model; None for the dummy model.
    """
    return [RANK_MODULE, *([] if family is None else [f"{_MODEL_MODULE}:{family}"])]


def start_fork_server_early(*, family: str | None, device: str) -> None:
    """Start the server before the command imports torch, if its ranks will be forked.

    Args:
        family: Family of the ranks' model; None for the dummy model.
        device: `cpu`, `cuda` or `cuda:N`.

    Raises:
        OutputError: No folder for temporary files can be written.
    """
    if start_method(device) == "forkserver":
        start_fork_server(modules_for(family))


def _preload(starter: int, folder: str, *modules: str) -> None:
    def end_if_starter_has_ended() -> None:
        if os.getppid() != starter:
            process_lifetime.kill_descendants()
            _remove(folder)
            os._exit(0)  # unloading torch takes Python a second

    # The kernel also sends the signal when only the thread that started this server ends, so the
    # handler checks whether the process has ended.
    signal.signal(signal.SIGUSR1, lambda *_: end_if_starter_has_ended())
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL))
    process_lifetime.end_with_parent(starter, signal.SIGUSR1)
    sys.excepthook = _print_unless_reported
    os.chdir("/")  # MKL ends a process whose working folder was deleted; a rank sets its own folder
    gc.disable()  # imported objects stay, and searching them takes a fifth of the time
    for module_and_family in modules:
        name, _, family = module_and_family.partition(":")
        module = importlib.import_module(name)
        if family:
            module.preload(family)
    gc.freeze()  # a search writes to every object, which would copy all pages into every rank
    gc.enable()

    def end() -> None:
        """End this server once the loop of multiprocessing has ended, after starter and ranks."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < deadline:  # the kernel may still be ending the starter
            end_if_starter_has_ended()
            time.sleep(0.01)
        os._exit(0)

    atexit.register(end)


def _print_unless_reported(
    kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    """Print an uncaught exception, except that of a refused fork, which the starter reports."""
    if limit_error(error) is None:
        sys.__excepthook__(kind, error, where)


def _remove(folder: str) -> None:
    """Remove the folder; try again while ranks that were just killed still write to it."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not process_lifetime.remove_temp_folder(folder) and time.monotonic() < deadline:
        pass


if _TASK in os.environ:  # this process is the server
    _preload(*json.loads(os.environ.pop(_TASK)))
