"""Owns the imports of the fork server; ends the server when the process that started it ends.

The server imports only this module, which then imports the others. That takes seconds, in which the
server does not notice that its starter has ended, so the kernel sends it a signal in that case.
Afterwards the server notices it by itself, and must survive the thread that started it. In both
cases it removes the folder of the socket, if no rank can do it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import shutil
import signal
import time
from typing import NoReturn

from svdpp.launch.process_lifetime import end_with_parent, outlive_parent

#: Environment variables of the server: the starter's process id, the folder of its sockets, and the
#: modules to import.
STARTER = "SVDPP_FORK_SERVER_STARTER"
FOLDER = "SVDPP_FORK_SERVER_FOLDER"
MODULES = "SVDPP_FORK_SERVER_MODULES"


def _preload(starter: int, folder: str, modules: str) -> None:
    def end(wait_seconds: float = 0.0) -> NoReturn:
        until = time.monotonic() + wait_seconds
        while os.getppid() == starter and time.monotonic() < until:
            time.sleep(0.01)
        if os.getppid() != starter:  # otherwise the starter may start another server
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    # The other threads of the starter may end a little after the one that started this process.
    signal.signal(signal.SIGUSR1, lambda *_: end(1.0))
    end_with_parent(starter, signal.SIGUSR1)
    os.chdir("/")  # MKL ends a process whose working folder has been deleted; each rank has its own
    for module in filter(None, modules.split(",")):
        importlib.import_module(module)
    outlive_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    if os.getppid() != starter:  # since the last import
        end()
    # The garbage collector writes to every object it visits, which would copy their pages into
    # every rank.
    gc.freeze()
    # Unloading torch takes Python a second, which would delay the end of the run.
    atexit.register(end, 0.2)


if STARTER in os.environ:  # the starter itself imports this module only for the names above
    _preload(int(os.environ.pop(STARTER)), os.environ.pop(FOLDER), os.environ.pop(MODULES))
