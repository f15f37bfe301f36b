"""Measures the cost of more ranks: seconds until they are ready, and memory.

Time: ranks of the demo model, by fork server and by spawn, each in a separate process, so that the
fork server's imports count every time. `ready` is the time from the group's start to the last
rank's `Joined`.

Memory: the proportional set size (/proc/<pid>/smaps_rollup, Pss: a page shared by n processes
counts 1/n in each) of all ranks and the fork server, with the demo model and with a checkpoint
whose UNet has random weights, at full size or smaller. Ranks load weights as `run` does: mapped
from the file if it has the requested dtype. Each rank has its roles: only the first one encodes.
One clip goes through all ranks first, because unread pages do not count.

    python tests/bench/start_time.py [--unet full|medium] [--worlds 1 2 4] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling

#: Channels of the UNet's four levels; SVD has 320, 640, 1280, 1280 (1.52 G parameters).
UNETS = {"full": (320, 640, 1280, 1280), "medium": (96, 192, 384, 384)}


def measure(model: str, dtype: str, world_size: int, start_method: str) -> dict[str, float]:
    """Starts ranks in this process, and ends them: seconds until ready, and summed PSS in bytes."""
    from svdpp.driver.pipeline import Pipeline
    from svdpp.launch import fork_server
    from svdpp.media.examples import example_photos

    config = PipelineConfig(
        world_size=world_size,
        model=ModelConfig(name=model, dtype=dtype),  # type: ignore[arg-type]
        sampling=SvdSampling(num_inference_steps=world_size, num_frames=2, height=64, width=64),
        decode=False,
    )
    fork_server.start_method = lambda device: start_method  # noqa: ARG005
    pipeline = Pipeline(config)
    begun = time.monotonic()
    with pipeline:
        ready = time.monotonic() - begun
        pipeline.run([ClipRequest(seed=0, image=str(example_photos()[0]))])
        return {"ready": ready, "pss": float(sum(map(_pss_bytes, _descendants())))}


def _descendants() -> list[int]:
    """All descendants of this process: ranks, fork server and resource tracker."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, below = [], [os.getpid()]
    while below:
        parent = below.pop()
        children = [pid for pid, above in parents.items() if above == parent]
        found += children
        below += children
    return found


def _pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def apart(model: str, dtype: str, world_size: int, start_method: str) -> dict[str, float]:
    """Runs `measure` in a separate process."""
    arguments = ["--measure", model, dtype, str(world_size), start_method]
    done = subprocess.run(
        [sys.executable, __file__, *arguments], check=True, capture_output=True, text=True
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


def save_checkpoint(folder: Path, unet: str, dtype: torch.dtype) -> int:
    """Writes a checkpoint with a random UNet; returns the bytes of its weight files."""
    from diffusers import StableVideoDiffusionPipeline, UNetSpatioTemporalConditionModel

    from svdpp.models.checkpoint import find_checkpoint
    from svdpp.models.loading import silence_libraries

    silence_libraries()
    demo = find_checkpoint(ModelConfig(name="demo")).folder
    pipe = StableVideoDiffusionPipeline.from_pretrained(demo, dtype=dtype)
    config = dict(pipe.unet.config)
    config |= {
        "block_out_channels": UNETS[unet],
        "num_attention_heads": tuple(channels // 32 for channels in UNETS[unet]),
        "down_block_types": (
            *("CrossAttnDownBlockSpatioTemporal",) * 3,
            "DownBlockSpatioTemporal",
        ),
        "up_block_types": ("UpBlockSpatioTemporal", *("CrossAttnUpBlockSpatioTemporal",) * 3),
        "layers_per_block": 2,
        "transformer_layers_per_block": 1,
    }
    torch.set_default_dtype(dtype)
    pipe.unet = UNetSpatioTemporalConditionModel.from_config(config)
    torch.set_default_dtype(torch.float32)
    pipe.save_pretrained(folder, safe_serialization=True, max_shard_size="20GB")
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def print_times(worlds: tuple[int, ...], repeats: int) -> None:
    """Prints both start methods, measured in turn, and the ratios to one rank's median."""
    for method in ("forkserver", "spawn"):
        medians = {}
        for world_size in worlds:
            runs = [apart("demo", "fp32", world_size, method)["ready"] for _ in range(repeats)]
            medians[world_size] = statistics.median(runs)
        text = ", ".join(f"{world} ranks {seconds:.2f} s" for world, seconds in medians.items())
        ratio = medians[worlds[-1]] / medians[worlds[0]]
        print(f"{method}: {text}; {worlds[-1]} against {worlds[0]}: {ratio:.2f}", flush=True)


def print_memory(label: str, model: str, dtype: str, num_bytes: int, worlds: list[int]) -> None:
    """Prints the summed PSS by world size, and each further rank's share of the checkpoint."""
    sums = {world: apart(model, dtype, world, "forkserver")["pss"] for world in worlds}
    print(f"{label}, {num_bytes / 1e9:.3f} GB of weights, ranks in {dtype}:")
    for world in worlds:
        added = (sums[world] - sums[worlds[0]]) / max(1, world - worlds[0])
        share = f", {added / num_bytes:.1%} of the weights a rank more" if added else ""
        print(f"  {world} ranks: {sums[world] / 1e9:.3f} GB{share}", flush=True)


def main() -> None:
    """Prints everything, or measures one case for `apart`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--unet", choices=UNETS, default="medium")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("time", "memory"))
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        model, dtype, world, method = arguments.measure
        print(json.dumps(measure(model, dtype, int(world), method)))
        return
    if arguments.only != "memory":
        print_times((1, 8), arguments.repeats)
    if arguments.only == "time":
        return
    from svdpp.models.checkpoint import find_checkpoint

    demo = find_checkpoint(ModelConfig(name="demo")).folder
    num_bytes = sum(path.stat().st_size for path in demo.rglob("*.safetensors"))
    print_memory("demo model", "demo", "fp32", num_bytes, arguments.worlds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        num_bytes = save_checkpoint(folder, arguments.unet, torch.bfloat16)
        label = f"{arguments.unet} UNet saved in bf16"
        print_memory(label, str(folder), "bf16", num_bytes, arguments.worlds)
        if arguments.unet != "full":  # each rank would have a copy of 6 GB
            print_memory(label, str(folder), "fp32", num_bytes, arguments.worlds)


if __name__ == "__main__":
    main()
