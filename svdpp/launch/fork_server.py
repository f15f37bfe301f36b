"""Fork server for CPU ranks, which imports torch and the model's classes once for all ranks.

This module does not import torch, so that a command can start the server before it imports torch
itself. The server is the fork server of multiprocessing. By default, that server does not notice
during its imports that its starter (the process that started the server) has ended. It also runs as
long as any rank runs, so a stopped rank (SIGSTOP) would keep it alive forever. So the server first
imports this module, which asks the kernel for a signal when the starter ends.
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

#: Module that the server imports for all ranks. `_MODEL_MODULE` is imported only if the ranks load
#: a model other than the dummy.
RANK_MODULE = "svdpp.worker.rank"
_MODEL_MODULE = "svdpp.models.engine.load"

#: Environment variable with a JSON list for the server: process id and temporary folder of the
#: process that starts the server, then the modules to import.
_TASK = "SVDPP_FORK_SERVER"
_WAIT_SECONDS = 1.0


def start_method(device: str) -> str:
    """Return the multiprocessing start method for ranks on a device: `forkserver` or `spawn`.

    Importing diffusers initialises CUDA, and a process that is forked afterwards cannot use CUDA.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.

    Returns:
        `forkserver` for ranks on the CPU, `spawn` for ranks on GPUs.
    """
    return "spawn" if device.startswith("cuda") else "forkserver"


def start_fork_server(preload: Sequence[str]) -> None:
    """Start the fork server of CPU ranks if it is not running, without waiting for its imports.

    Args:
        preload: Modules that the server imports; see `modules_for`.

    Raises:
        OutputError: No folder for temporary files can be written.
    """
    end_fork_server(only_if_stopped=True)
    _end_server_at_exit()
    # The resource tracker must be started before signals are blocked, because its start unblocks
    # signals.
    resource_tracker.ensure_running()
    forkserver.set_forkserver_preload([__name__])
    task = json.dumps([os.getpid(), process_lifetime.temp_dir(), *preload])
    with process_lifetime.environment_defaults({_TASK: task}), process_lifetime.signals_blocked():
        forkserver.ensure_running()


@functools.cache
def _end_server_at_exit() -> None:
    # Without this handler, a fork server that is stopped (SIGSTOP) would outlive this process.
    atexit.register(end_fork_server)


def modules_for(family: str | None) -> list[str]:
    """Return the names of the modules that the fork server imports for a model.

    The result is the argument `preload` of `start_fork_server` and `start_ranks`.

    Args:
        family: Family of the ranks' model; None for the dummy model.
    """
    return [RANK_MODULE, *([] if family is None else [f"{_MODEL_MODULE}:{family}"])]


def start_fork_server_early(*, family: str | None, device: str) -> None:
    """Start the fork server if ranks on `device` need it.

    Call this before torch is imported: then the server imports torch at the same time as this
    process, and the ranks start earlier.

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
            _remove_temp_folder(folder)
            os._exit(0)  # a normal exit would take a second to unload torch

    # The kernel also sends the signal if only the thread that started this server has ended. So the
    # handler checks whether the whole process has ended.
    signal.signal(signal.SIGUSR1, lambda *_: end_if_starter_has_ended())
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL))
    process_lifetime.end_with_parent(starter, signal.SIGUSR1)
    sys.excepthook = _print_unless_reported
    # MKL aborts if the working folder is deleted. Ranks set a working folder of their own.
    os.chdir("/")
    gc.disable()  # garbage collection would take a fifth of the import time
    for module_and_family in modules:
        name, _, family = module_and_family.partition(":")
        module = importlib.import_module(name)
        if family:
            module.preload(family)
    # Without the freeze, a garbage collection in a rank would write to all shared pages of memory,
    # and the kernel would copy the pages for this rank.
    gc.freeze()
    gc.enable()

    def end() -> None:
        """Exit this fork server. If its starter ends within a second, kill the ranks first.

        This function runs at the server's normal exit, which begins when the starter (the process
        that started the server) and all ranks have closed their ends of multiprocessing's pipe to
        the server.
        """
        deadline = time.monotonic() + _WAIT_SECONDS
        # The check is repeated, because an ending process closes its pipes a moment before its
        # children get another parent, by which they notice its end.
        while time.monotonic() < deadline:
            end_if_starter_has_ended()
            time.sleep(0.01)
        os._exit(0)

    atexit.register(end)


def _print_unless_reported(
    kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    """Print an uncaught exception of the fork server, unless the parent reports it.

    If the exception means that the system refused to start a process or thread, the parent reports
    it.
    """
    if limit_error(error) is None:
        sys.__excepthook__(kind, error, where)


def _remove_temp_folder(folder: str) -> None:
    """Remove the server's temporary folder; retry, because killed ranks may still write to it."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not process_lifetime.remove_temp_folder(folder) and time.monotonic() < deadline:
        pass


if _TASK in os.environ:  # if the variable is set, this process is the fork server
    _preload(*json.loads(os.environ.pop(_TASK)))
