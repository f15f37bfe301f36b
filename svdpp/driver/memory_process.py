"""Memory estimates and FLOP counts, in this process or in a separate one.

An estimate or count runs Python code for seconds. Under a launcher (torchrun or srun), rank 0 is a
thread of this process, and would wait for the GIL, so the work is done in a separate process.
Without a launcher, the work is done in this process by default, because a separate process would
take seconds to import diffusers.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from svdpp.config import ModelConfig, SamplingConfig
from svdpp.errors import SvdppError, error_from_dict, error_to_dict, first_line
from svdpp.launch.process_lifetime import end_with_parent, environment_defaults
from svdpp.launch.world import was_launched
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.costs import MemoryEstimate, PartFlops, PartMemory

_Task = Literal["memory", "flops"]

#: Timeout of the separate process in seconds. An estimate takes a few seconds, but minutes on a
#: machine that swaps.
_TIMEOUT_SECONDS = 600.0
_KEPT = 64
_NAMES: Mapping[_Task, str] = {
    "memory": "the estimate of memory",
    "flops": "the count of FLOPs",
}


@lru_cache(_KEPT)
def estimate_memory(
    checkpoint: Checkpoint,
    model: ModelConfig,
    sampling: SamplingConfig,
    device: str,
    num_threads: int,
    *,
    apart: bool = False,
) -> MemoryEstimate:
    """Estimate the memory of each part of a model; see `models.memory.estimate`.

    Args:
        checkpoint: Checkpoint of the model; only its configs are read.
        model: Configuration of the model.
        sampling: Resolved sampling parameters.
        device: `cpu`, or a CUDA device. Temporary memory of kernels is counted only for `cpu`.
        num_threads: Number of intra-op threads of a rank on a CPU. torch's choice of kernels, and
            so the memory, depends on this number.
        apart: Whether to estimate in a separate process, so that this process does not import
            diffusers (350 MB). Under a launcher, a separate process is always used.

    Raises:
        RequestError: The model cannot make a clip of this size.
        ModelError: A component cannot be created from its config.
        SvdppError: The separate process failed, or took longer than 600 s.
    """
    arguments = (checkpoint, model, sampling, device, num_threads)
    if not (apart or was_launched()):
        return _estimate(arguments)
    return MemoryEstimate(*(PartMemory(*part) for part in _in_process("memory", arguments)))


def count_flops(checkpoint: Checkpoint, model: ModelConfig, sampling: SamplingConfig) -> PartFlops:
    """Count the FLOPs of a clip's encode, of one step, and of the clip's decode.

    Under a launcher (torchrun or srun), the FLOPs are counted in a separate process.

    Args:
        checkpoint: Checkpoint of the model; only its configs are read.
        model: Model, whose options decide how the components are built.
        sampling: Resolved sampling parameters, with the size and number of frames of the clip.

    Raises:
        RequestError: The model cannot make a clip of this size.
        ModelError: A component cannot be created from its config.
        SvdppError: The separate process failed, or took longer than 600 s.
    """
    arguments = (checkpoint, model, sampling)
    return PartFlops(*_in_process("flops", arguments)) if was_launched() else _count(arguments)


def _in_process(task: _Task, arguments: tuple[Any, ...]) -> list[Any]:
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    try:
        done = subprocess.run(
            # Without the option -P, Python's -m would import modules from the working folder first,
            # so that a user's file such as numpy.py would hide the library.
            [sys.executable, "-P", "-m", __name__],
            input=pickle.dumps((task, arguments)),
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )
    except subprocess.TimeoutExpired as error:
        raise SvdppError(
            f"{_NAMES[task]} took longer than {_TIMEOUT_SECONDS:.0f} s",
            "try again when the machine is less busy",
            details={"timeout_seconds": _TIMEOUT_SECONDS},
        ) from error
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise SvdppError(
            f"{_NAMES[task]} ended with exit code {done.returncode}: {first_line(last)}",
            details={"exit_code": done.returncode},
        )
    response = json.loads(lines[-1])
    if "error" in response:
        raise error_from_dict(response["error"])
    parts: list[Any] = response["parts"]
    return parts


def _estimate(arguments: tuple[Any, ...]) -> MemoryEstimate:
    from svdpp.models.memory import estimate  # this imports diffusers, which takes seconds

    checkpoint, model, sampling, device, num_threads = arguments
    return estimate(checkpoint, model, sampling, device=device, num_threads=num_threads)


def _count(arguments: tuple[Any, ...]) -> PartFlops:
    from svdpp.models import memory  # this imports diffusers, which takes seconds

    return memory.count_flops(*arguments)


def _respond(task: _Task, arguments: tuple[Any, ...]) -> dict[str, Any]:
    try:
        return {"parts": [*(_count(arguments) if task == "flops" else _estimate(arguments))]}
    except SvdppError as error:
        return {"error": error_to_dict(error)}


def main() -> None:
    """Read a task (memory or FLOPs of a model) from stdin; write the result as JSON to stdout.

    The result is the last line of stdout.
    """
    end_with_parent()
    task, arguments = pickle.load(sys.stdin.buffer)
    with environment_defaults():
        response = _respond(task, arguments)
    sys.stdout.write(json.dumps(response) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a normal exit would take a second to unload libraries


if __name__ == "__main__":
    main()
