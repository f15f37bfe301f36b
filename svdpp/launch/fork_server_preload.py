"""Owns the imports of the fork server, and the end of the server with the process that started it.

Python's own fork server lives as long as its ranks, so it would wait for a stopped rank for ever,
and it notices nothing while it imports. This one gets a signal of the kernel when its starter ends.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import shutil
import signal
import time
from pathlib import Path

from svdpp.launch import process_lifetime

#: Environment variables of the server: the starter's process id, the folder of the starter's
#: temporary files, and the modules to import.
STARTER = "SVDPP_FORK_SERVER_STARTER"
FOLDER = "SVDPP_FORK_SERVER_FOLDER"
MODULES = "SVDPP_FORK_SERVER_MODULES"

_WAIT_SECONDS = 1.0


def _preload(starter: int, folder: Path, modules: str) -> None:
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
    for module in filter(None, modules.split(",")):
        importlib.import_module(module)
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


def _remove(folder: Path) -> None:
    """Removes the folder, to which ranks that have just been killed may still write."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)


if STARTER in os.environ:  # the starter itself imports this module only for the names above
    _preload(int(os.environ.pop(STARTER)), Path(os.environ.pop(FOLDER)), os.environ.pop(MODULES))
