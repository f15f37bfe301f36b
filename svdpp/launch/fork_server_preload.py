"""Owns what the fork server imports, and its bond to the process that started it.

The server imports this one module. While it imports the others, which takes seconds, it looks at
nothing else, so the kernel is asked to end it with its starter. Afterwards the server ends by
itself when its starter does, and must not end with the thread that happened to start it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os

from svdpp.launch.process_lifetime import end_with_parent, outlive_parent

#: In the server's environment: its starter's process id, which may be gone by now, and the modules.
STARTER = "SVDPP_FORK_SERVER_STARTER"
MODULES = "SVDPP_FORK_SERVER_MODULES"


def _preload(starter: int, modules: str) -> None:
    end_with_parent(starter)
    for module in filter(None, modules.split(",")):
        importlib.import_module(module)
    outlive_parent()
    # The garbage collector writes into every object that it looks at: each rank would end up with
    # its own copy of them all.
    gc.freeze()
    # Python takes a second to tear torch down, and the run would seem to live on.
    atexit.register(os._exit, 0)


if STARTER in os.environ:  # not in the starter, which takes only the names from here
    _preload(int(os.environ.pop(STARTER)), os.environ.pop(MODULES))
