"""What a process sets before it imports torch: variables, garbage collection. No torch."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping

_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def set_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets each variable that the user has not set, for this process and its later children."""
    environment.update(_missing(environment))


@contextlib.contextmanager
def defaults(more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Sets the defaults and `more` for libraries imported and processes started within the block.

    This process gets its own environment back: in a user's program it may compile or log.
    """
    added = {**_missing(os.environ), **(more or {})}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _missing(environment: Mapping[str, str]) -> dict[str, str]:
    values = {
        # Transformers and diffusers print messages while they are imported.
        "TRANSFORMERS_VERBOSITY": "error",
        "DIFFUSERS_VERBOSITY": "error",
        # Transformers imports torch._dynamo, which creates Inductor's cache folder at once. Nothing
        # here compiles, so a folder that exists will do.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TMPDIR", "/tmp"),
        # By default libgomp's threads spin for milliseconds at the end of every parallel region.
        # Where ranks have more threads than there are free cores, that is most of the time.
        "OMP_WAIT_POLICY": "passive",
        # Reduces fragmentation: the tensors of a clip have many sizes. The name before torch 2.9 is
        # PYTORCH_CUDA_ALLOC_CONF.
        "PYTORCH_ALLOC_CONF": environment.get(
            "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
        ),
        # The parent monitors the ranks and names the one that fails. NCCL's watchdog would first
        # abort the neighbours of that rank, or a rank that holds the GIL for long.
        _NCCL_ERRORS: "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    given = set(environment)
    if "TORCHELASTIC_RUN_ID" in environment and environment.get(_NCCL_ERRORS) == "1":
        given.discard(_NCCL_ERRORS)  # torchrun exports 1 if the user has not set it
    return {name: value for name, value in values.items() if name not in given}


def collect_rarely() -> None:
    """Saves a sixth of the time that the imports of torch and diffusers and their end take.

    These imports create a million objects that stay. By default Python searches them for garbage
    again and again, and several times more while it exits.
    """
    gc.set_threshold(10_000, 20, 100)
    atexit.register(gc.freeze)


# A launcher's variables, which would make a child process one of its ranks.
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID")


def helper_command(module: str, *arguments: str) -> list[str]:
    """The command that runs `module`; `-P`, because `-m` adds the working folder to the path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def helper_environment() -> dict[str, str]:
    """This process's environment and search path, without a launcher's variables."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
