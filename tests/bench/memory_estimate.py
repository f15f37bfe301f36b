"""Prints the plan's memory estimate beside the measured peak of a fresh process, part by part.

python tests/bench/memory_estimate.py                        the demo model at several sizes
python tests/bench/memory_estimate.py --full-size FOLDER     a random UNet of SVD's size (3 GB)

It runs on the CPU with one thread. All figures are for the whole process: libraries, weights and
activations.

Two peaks are measured. For `needed`, malloc returns freed blocks of 128 KiB and more at once
(MALLOC_MMAP_THRESHOLD_=131072), so the peak is what is alive at the same time, as in the estimate.
For `held`, malloc is as in ranks: glibc keeps freed blocks, because new pages from the kernel cost
time. How many it keeps varies between equal runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from svdpp.config import ModelConfig, SvdSampling
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.memory import bare_process_bytes, estimate
from tests.models.builders import save_tiny_checkpoint

MIB = 2**20

MEASURE = """
import json, sys
from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.launch import environment
environment.set_defaults()
from svdpp.models import determinism
import torch
from PIL import Image
from svdpp.media.examples import example_requests
from svdpp.plan.layout import Roles
from svdpp.worker.memory import status_bytes
from svdpp.driver.resolve import resolve
from svdpp.worker.rank import load_model
name, dtype, side, frames, part = json.loads(sys.argv[1])
determinism.apply_settings(num_threads=1, device="cpu")
sampling = SvdSampling(num_inference_steps=1, height=side, width=side, num_frames=frames)
config, checkpoint = resolve(
    PipelineConfig(world_size=1, model=ModelConfig(name=name, dtype=dtype), sampling=sampling)
)
roles = Roles(**{each: each == part for each in ("encode", "denoise", "decode")})
model = load_model(config, checkpoint, "cpu", roles)
tensors = model.probe_packet(has_stepped=part == "decode")
for request in example_requests(config, 2):
    if part == "encode":
        model.encode(model.prepare(Image.new("RGB", (side, side))), request)
    elif part == "denoise":
        with torch.no_grad():
            model.denoise(tensors, 0, 1, lambda *_: None)
    else:
        model.decode(tensors)
print(status_bytes("VmHWM"))
"""


def main() -> None:
    """Prints one line for each part and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full-size", metavar="FOLDER", type=Path, default=None)
    folder: Path | None = parser.parse_args().full_size
    base = bare_process_bytes()
    print(f"bare process: {base / MIB:.0f} MiB")
    if folder is not None:
        if not folder.exists():
            save_full_size(folder)
        compare(str(folder), "bf16", 64, ("denoise",), base)
        return
    for side in (64, 128, 192, 256):
        compare("demo", "fp32", side, ("encode", "denoise", "decode"), base)


def compare(name: str, dtype: str, side: int, parts: tuple[str, ...], base: int) -> None:
    """Prints estimate and measurement for 14 frames of `side` x `side`."""
    model = ModelConfig(name=name, dtype=dtype)  # type: ignore[arg-type]
    sampling = SvdSampling(height=side, width=side, num_frames=14, decode_chunk_size=14)
    told = estimate(find_checkpoint(model), model, sampling, device="cpu")
    for part in parts:
        estimated = base + getattr(told, part).peak_bytes
        needed = measure(name, dtype, side, part, MALLOC_MMAP_THRESHOLD_="131072")
        held = measure(name, dtype, side, part)
        print(
            f"{name} {dtype} 14x{side}x{side} {part:<8} estimated {estimated / MIB:6.0f} MiB, "
            f"needed {needed / MIB:6.0f} MiB, ratio {estimated / needed:.3f}; "
            f"held {held / MIB:6.0f} MiB, ratio {estimated / held:.3f}",
            flush=True,
        )


def measure(name: str, dtype: str, side: int, part: str, **environment: str) -> int:
    """The peak resident bytes of a fresh process that loads `part` and runs it twice."""
    asked = json.dumps([name, dtype, side, 14, part])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, asked],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.splitlines()[-1])


def save_full_size(folder: Path) -> None:
    """A checkpoint whose UNet has SVD's size (1.52 G parameters) and random weights."""
    from diffusers import UNetSpatioTemporalConditionModel

    save_tiny_checkpoint(folder, num_frames=14, embedding_dim=1024, dtype=torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        UNetSpatioTemporalConditionModel(
            num_attention_heads=(5, 10, 20, 20), num_frames=14
        ).save_pretrained(folder / "unet")
    finally:
        torch.set_default_dtype(torch.float32)


if __name__ == "__main__":
    main()
