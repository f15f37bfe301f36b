"""Memory estimates, in a process of their own wherever this one may compute.

The estimate changes torch's default dtype and its number of threads, which all threads of a process
share. Under torchrun rank 0 computes in a thread of the process that checks requests: there these
would change the bits of its clip. A process that starts its ranks computes nothing, and saves the
seconds that a further one takes to import diffusers.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from functools import lru_cache
from typing import Any

from svdpp.config import ModelConfig, SamplingConfig
from svdpp.errors import SvdppError, error_from_dict, error_to_dict, first_line
from svdpp.launch.process_lifetime import end_with_parent, environment_defaults
from svdpp.launch.world import was_launched
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.costs import MemoryEstimate, PartMemory

#: An estimate takes seconds, and its imports as long; a machine that swaps may need minutes.
_TIMEOUT_SECONDS = 600.0
_KEPT = 64


@lru_cache(_KEPT)
def estimate_memory(
    checkpoint: Checkpoint,
    model: ModelConfig,
    sampling: SamplingConfig,
    device: str,
    num_threads: int,
) -> MemoryEstimate:
    """Estimate the memory of each part of a model; see `models.memory.estimate`.

    Args:
        checkpoint: checked checkpoint; only its configs are read.
        model: model that the checkpoint belongs to.
        sampling: resolved sampling parameters.
        device: `cpu` or a CUDA device, whose kernels need no workspace that is counted.
        num_threads: intra-op threads of a CPU rank, on which its kernels depend.

    Raises:
        RequestError: the model cannot make a clip of this size.
        ModelError: a component cannot be made from its config.
        SvdppError: the process failed, or took longer than 600 s.
    """
    arguments = (checkpoint, model, sampling, device, num_threads)
    return _in_process(arguments) if was_launched() else _estimate(arguments)


def _in_process(arguments: tuple[Any, ...]) -> MemoryEstimate:
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    try:
        done = subprocess.run(
            # `-P`, because `-m` adds the working folder to the path.
            [sys.executable, "-P", "-m", __name__],
            input=pickle.dumps(arguments),
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )
    except subprocess.TimeoutExpired as error:
        raise SvdppError(
            f"the estimate of memory took longer than {_TIMEOUT_SECONDS:.0f} s",
            "use less of the machine, or leave --memory out",
            details={"timeout_seconds": _TIMEOUT_SECONDS},
        ) from error
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise SvdppError(
            f"the estimate of memory ended with exit code {done.returncode}: {first_line(last)}",
            details={"exit_code": done.returncode},
        )
    response = json.loads(lines[-1])
    if "error" in response:
        raise error_from_dict(response["error"])
    return MemoryEstimate(*(PartMemory(*part) for part in response["parts"]))


def _estimate(arguments: tuple[Any, ...]) -> MemoryEstimate:
    from svdpp.models.memory import estimate  # diffusers: seconds

    checkpoint, model, sampling, device, num_threads = arguments
    return estimate(checkpoint, model, sampling, device=device, num_threads=num_threads)


def _respond(arguments: tuple[Any, ...]) -> dict[str, Any]:
    try:
        return {"parts": [*_estimate(arguments)]}
    except SvdppError as error:
        return {"error": error_to_dict(error)}


def main() -> None:
    """Read what to estimate from stdin, and write the response as the last line of stdout."""
    end_with_parent()
    arguments = pickle.load(sys.stdin.buffer)
    with environment_defaults():
        response = _respond(arguments)
    sys.stdout.write(json.dumps(response) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the libraries take a second to end


if __name__ == "__main__":
    main()
