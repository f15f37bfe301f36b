"""Measures what phantom steps cost a rank, with latents of published and of small sizes.

    python tests/bench/phantom_steps.py

The denoisers are small, and not called: the call ends where the rank's first own step begins.
With small latents nearly all of the time is Python's, as on a GPU, which takes microseconds for
the tensor operations of a phantom step.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from svdpp.models.base import Tensors
from svdpp.models.engine.model import EngineModel, load_model
from svdpp.plan.layout import Roles
from tests.models.builders import edit_json
from tests.models.range_checks import model_of, nothing, probe_packet, read_folder
from tests.models.test_rows import CASES
from tests.models.tiny_families import save_tiny

STEPS, CALLS = 50, 3
#: Height, width and frames of published models.
SIZES = {"wan-image-bf16": (480, 832, 81), "svd": (576, 1024, 25)}


class _FirstStep(Exception):
    """The rank's first own step begins."""


def main() -> None:
    torch.set_num_threads(1)
    print(f"CPU time of one thread{'latents':>16}{'49 phantom steps':>20}{'each':>12}")
    for name, published in SIZES.items():
        for size in (published, None):
            with tempfile.TemporaryDirectory() as folder:
                print(_line(name, size, Path(folder)), flush=True)


def _line(name: str, size: tuple[int, int, int] | None, folder: Path) -> str:
    case = CASES[name]
    channels = {"z_dim": 16} if case.family == "wan" else {}
    save_tiny(case.family, folder, image=case.image, **case.changes, **channels)
    for config in folder.glob("transformer*/config.json"):
        edit_json(config, rope_max_seq_len=1024)  # as published
    checkpoint = read_folder(folder)
    sizes = dict(zip(("height", "width", "num_frames"), size, strict=True)) if size else {}
    sampling = checkpoint.resolve(case.config(num_inference_steps=STEPS, **sizes))
    roles = Roles(encode=False, denoise=True, decode=False, experts=frozenset({0, 1}))
    model = load_model(checkpoint, model_of(checkpoint, case.dtype), sampling, "cpu", roles)
    for denoiser in checkpoint.row.denoisers:
        if getattr(model._pipe, denoiser, None) is not None:
            getattr(model._pipe, denoiser).forward = _begin
    packet: Tensors = probe_packet(
        model, dtype=model_of(checkpoint, case.dtype).dtype, has_stepped=True
    )
    whole = _seconds(model, packet, STEPS - 1)
    each = (whole - _seconds(model, packet, 1)) / (STEPS - 2)
    megabytes = packet["latents"].nbytes / 1e6
    return f"{name:22}{megabytes:13.2f} MB{whole:18.2f} s{each * 1e3:9.2f} ms"


def _begin(*_: Any, **__: Any) -> None:
    raise _FirstStep


def _seconds(model: EngineModel, packet: Tensors, start: int) -> float:
    """CPU time of a call until step `start` begins."""
    found = []
    for _ in range(CALLS):
        begun = time.process_time()
        try:
            model.denoise(packet, start, start + 1, nothing)
        except _FirstStep:
            found.append(time.process_time() - begun)
    return statistics.median(found)


if __name__ == "__main__":
    main()
