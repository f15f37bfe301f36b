"""Owns the fork server: what it imports, once for all ranks, and its start. Knows no torch.

The seconds that torch and diffusers take to import are the longest part of a start. They pass in
the server, beside what the command itself has to do, where it is started first thing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker

from svdpp.launch.process_lifetime import signals_held
from svdpp.launch.tether import STARTER
from svdpp.launch.world import find_world

#: What ranks import: the engine, and SVD where they run it.
ENGINE = "svdpp.worker.rank"
SVD = "svdpp.models.svd.model"

_BOND = "svdpp.launch.tether", "svdpp.launch.untether"


def start(preload: Sequence[str]) -> None:
    """Starts the server unless it runs, and does not wait for its imports.

    Args:
        preload: modules that it imports; without effect where it runs already.
    """
    quiet_libraries()
    resource_tracker.ensure_running()  # it would let signals through again
    forkserver.set_forkserver_preload([_BOND[0], *preload, _BOND[1]])
    os.environ[STARTER] = str(os.getpid())
    with signals_held():
        forkserver.ensure_running()
    del os.environ[STARTER]


def start_early(*, svd: bool) -> None:
    """`start`, before a command imports torch for itself; not where others have started the ranks.

    Args:
        svd: whether the ranks run SVD rather than the dummy model.
    """
    if find_world() is None:
        start([ENGINE, SVD] if svd else [ENGINE])
    else:
        quiet_libraries()


def quiet_libraries() -> None:
    """Keeps the libraries' chatter out of processes that are started after this, unless asked for.

    By the environment, since they speak while they are imported.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
