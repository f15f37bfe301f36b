"""Owns the fork server: what it imports, once for all ranks, and its start. Knows no torch.

Importing torch and diffusers takes most of the time of a start. A command that starts the server
first goes on while the server imports them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
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
    resource_tracker.ensure_running()  # it would let signals through again
    forkserver.set_forkserver_preload([_BOND[0], *preload, _BOND[1]])
    with child_environment({STARTER: str(os.getpid())}), signals_held():
        forkserver.ensure_running()


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
    """Keeps libraries from printing, and from creating a folder, while they are imported.

    By variables of the environment that are not set yet; for this process and those it starts.
    """
    for name, value in _quiet_variables().items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def child_environment(more: dict[str, str] | None = None) -> Iterator[None]:
    """Sets what `quiet_libraries` sets, and `more`, for processes that are started in the block.

    This process gets its own environment back: it may be the user's, who compiles or logs.
    """
    wanted = {**_quiet_variables(), **(more or {})}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _quiet_variables() -> dict[str, str]:
    return {
        "TRANSFORMERS_VERBOSITY": "error",
        "DIFFUSERS_VERBOSITY": "error",
        # Transformers imports torch._dynamo, which creates Inductor's cache folder at once. Nothing
        # here compiles, so a folder that exists will do.
        "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir(),
        # By default libgomp's threads spin for milliseconds at the end of every parallel region.
        # Where ranks have more threads than there are cores free, that is most of the time.
        "OMP_WAIT_POLICY": "passive",
    }
