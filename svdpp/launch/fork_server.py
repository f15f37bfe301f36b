"""The fork server: its start, what it imports once for all CPU ranks, its end. No torch.

Importing torch and diffusers takes most of the time of a start. A command that starts the server
first goes on while the server imports them. Ranks on CUDA are started by `spawn` instead: importing
diffusers initialises CUDA, and a process forked afterwards cannot use it.

Python's own fork server lives as long as its ranks, so it would wait for a stopped rank for ever,
and it notices nothing while it imports. This one gets a signal of the kernel when its starter ends.
The server imports this module first.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util

from svdpp.launch import environment, process_lifetime

#: Imported for all ranks, and for those with a model, whose family's classes it also imports.
RANK_MODULE = "svdpp.worker.rank"
_MODEL_MODULE = "svdpp.models.engine.load"

#: Environment variable of the server: the starter's process id, the folder of the starter's
#: temporary files, and the modules to import.
_TASK = "SVDPP_FORK_SERVER"
_WAIT_SECONDS = 1.0


def start_method(device: str) -> str:
    """The multiprocessing start method for ranks on `device`."""
    return "spawn" if device.startswith("cuda") else "forkserver"


def start(preload: Sequence[str]) -> None:
    """Starts the server unless it is running; does not wait for its imports."""
    resource_tracker.ensure_running()  # first, because starting it unblocks the signals
    forkserver.set_forkserver_preload([__name__])
    task = json.dumps([os.getpid(), util.get_temp_dir(), *preload])
    with environment.defaults({_TASK: task}), process_lifetime.signals_blocked():
        forkserver.ensure_running()


def modules_for(family: str | None) -> list[str]:
    """The modules that ranks need; `family` is that of their model, None for the dummy model."""
    return [RANK_MODULE, *([] if family is None else [f"{_MODEL_MODULE}:{family}"])]


def start_early(*, family: str | None, device: str) -> None:
    """Starts the server before the command itself imports torch, if its ranks will be forked.

    Only for ranks that this process will start, and no launcher.
    """
    if start_method(device) == "forkserver":
        start(modules_for(family))


def _preload(starter: int, folder: str, *modules: str) -> None:
    def end_if_starter_has_ended() -> None:
        if os.getppid() != starter:
            process_lifetime.kill_descendants()
            _remove(folder)
            os._exit(0)  # unloading torch takes Python a second

    # The kernel sends the signal also when only the thread that started this server has ended.
    signal.signal(signal.SIGUSR1, lambda *_: end_if_starter_has_ended())
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL))
    process_lifetime.end_with_parent(starter, signal.SIGUSR1)
    os.chdir("/")  # MKL ends a process whose working folder has been deleted; each rank has its own
    # The garbage collector would find nothing: what an import creates stays. Its searches take a
    # fifth of the time.
    gc.disable()
    for module_and_family in modules:
        name, _, family = module_and_family.partition(":")
        module = importlib.import_module(name)
        if family:
            module.preload(family)
    # The garbage collector writes to every object it visits, which would copy their pages into
    # every rank.
    gc.freeze()
    gc.enable()

    def end() -> None:
        """Ends this server when Python's own loop has noticed the end of starter and ranks."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < deadline:  # the kernel may still be ending the starter
            end_if_starter_has_ended()
            time.sleep(0.01)
        os._exit(0)

    atexit.register(end)


def _remove(folder: str) -> None:
    """Removes the folder, to which ranks that have just been killed may still write."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not process_lifetime.remove_temp_folder(folder) and time.monotonic() < deadline:
        pass


if _TASK in os.environ:  # in the server
    _preload(*json.loads(os.environ.pop(_TASK)))
