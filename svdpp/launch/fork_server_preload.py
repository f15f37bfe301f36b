"""Owns the imports of the fork server; ends the server when the process that started it ends.

The server imports only this module, which then imports the others. That takes seconds, in which the
server does not notice that its starter has ended, so the kernel kills it in that case. Afterwards
the server notices it by itself, and must survive the thread that started it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os

from svdpp.launch.process_lifetime import end_with_parent, outlive_parent

#: Environment variables of the server: the starter's process id, and the modules to import.
STARTER = "SVDPP_FORK_SERVER_STARTER"
MODULES = "SVDPP_FORK_SERVER_MODULES"


def _preload(starter: int, modules: str) -> None:
    end_with_parent(starter)
    os.chdir("/")  # MKL ends a process whose working folder has been deleted; each rank has its own
    # The garbage collector would find nothing: what an import creates stays. Its searches take a
    # fifth of the time.
    gc.disable()
    for module in filter(None, modules.split(",")):
        importlib.import_module(module)
    outlive_parent()
    # The garbage collector writes to every object it visits, which would copy their pages into
    # every rank.
    gc.freeze()
    gc.enable()
    # Unloading torch takes Python a second, which would delay the end of the run.
    atexit.register(os._exit, 0)


if STARTER in os.environ:  # the starter itself imports this module only for the names above
    _preload(int(os.environ.pop(STARTER)), os.environ.pop(MODULES))
