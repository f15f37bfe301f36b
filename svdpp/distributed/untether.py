"""Owns the end of the bond that `tether` makes; a module that the fork server preloads last.

It also spares the server, which ends after its starter, the second that Python takes to take torch
apart: the run would seem to live on.
"""

from __future__ import annotations

import atexit
import os

from svdpp.distributed.process_end import outlive_parent

outlive_parent()
atexit.register(os._exit, 0)
