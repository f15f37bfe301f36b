"""Owns the end of the bond that `tether` makes; a module that the fork server preloads last.

It also has the server give its ranks what it imported in a form that they can share: Python's
garbage collector writes into every object that it looks at, and each rank would come to have its
own copy of them all (`gc.freeze`). And it spares the server, which ends after its starter, the
second that Python takes to take torch apart: the run would seem to live on.
"""

from __future__ import annotations

import atexit
import gc
import os

from svdpp.launch.process_lifetime import outlive_parent

outlive_parent()
gc.freeze()
atexit.register(os._exit, 0)
