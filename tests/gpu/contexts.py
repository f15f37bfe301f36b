"""python -m tests.gpu.contexts DEVICE RANKS: print which processes of a run have a CUDA context.

The output is JSON with UUIDs of GPUs: `ranks` has a list for each rank, and `parent` a list for
this process. This program runs in a new process, because pytest's process may have contexts of
other tests.
"""

from __future__ import annotations

import json
import os
import sys

import pynvml

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling
from svdpp.driver.pipeline import Pipeline


def _held_by(pid: int) -> list[str]:
    pynvml.nvmlInit()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        if pid in {process.pid for process in processes}:
            found.append(pynvml.nvmlDeviceGetUUID(handle))
    return found


def main() -> None:
    """Make a clip, and print the UUIDs of the GPUs on which its processes have CUDA contexts."""
    device, world_size = sys.argv[1], int(sys.argv[2])
    config = PipelineConfig(
        world_size=world_size,
        model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8)),
        sampling=SvdSampling(num_inference_steps=world_size),
        device=device,
    )
    with Pipeline(config) as pipeline:
        pipeline.run([ClipRequest(seed=0)])
        ranks = [_held_by(pid) for pid in pipeline.rank_pids]
    print(json.dumps({"ranks": ranks, "parent": _held_by(os.getpid())}))


if __name__ == "__main__":
    main()
