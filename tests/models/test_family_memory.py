"""Memory estimates of Wan and LTX-Video: exact for weights, close to torch's allocator otherwise.

The clips are large enough, and the weights small enough, that activations dominate. The issue asks
for 15%.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from svdpp.config import LtxSampling, WanSampling
from svdpp.models.engine.model import EngineModel, load_model
from svdpp.models.memory import MemoryEstimate, estimate, num_bytes
from svdpp.plan.layout import Roles
from tests.models.allocator import allocated_peak
from tests.models.range_checks import (
    loaded,
    model_of,
    nothing,
    photograph,
    read_folder,
    request_of,
)
from tests.models.tiny_families import save_tiny_ltx, save_tiny_wan

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

SIZES: dict[str, Any] = {
    **{"num_inference_steps": 2, "height": 96, "width": 96, "num_frames": 9},
    "max_sequence_length": 16,
}
QUICK = "ltx-timestep"
MORE = [pytest.mark.long, pytest.mark.full]

WAN: dict[str, Any] = {"boundary_ratio": 0.875, "width": 8}
CASES = {
    "wan-t2v": (WAN, "fp32", False),
    "wan-i2v": ({**WAN, "image_to_video": True, "dtype": torch.bfloat16}, "bf16", True),
    "wan-2.1-i2v": ({"image_encoder": True, "image_to_video": True, "width": 8}, "fp32", True),
    "wan-5b-i2v": ({"expand_timesteps": True, "width": 8}, "fp32", True),
    "ltx": ({"width": 8}, "fp32", False),
    "ltx-i2v": ({"width": 8, "dtype": torch.bfloat16}, "bf16", True),
    "ltx-timestep": ({"width": 8, "timestep_conditioning": True}, "fp32", False),
}


def _loaded(folder: Path, name: str) -> tuple[MemoryEstimate, EngineModel]:
    """The estimate, and a model with all parts."""
    options, dtype, from_image = CASES[name]
    experts = frozenset({0, 1} if "boundary_ratio" in options else {0})
    roles = Roles(encode=True, denoise=True, decode=True, experts=experts)
    is_wan = name.startswith("wan")
    save: Any = save_tiny_wan if is_wan else save_tiny_ltx
    checkpoint = read_folder(save(folder, **options))
    family: Any = WanSampling if is_wan else LtxSampling
    sampling = checkpoint.resolve(family(**SIZES, from_image=from_image))
    model = model_of(checkpoint, dtype)
    estimated = estimate(checkpoint, model, sampling, device="cpu")
    return estimated, load_model(checkpoint, model, sampling, "cpu", roles)


@pytest.mark.parametrize(
    "name",
    [
        QUICK,
        pytest.param("wan-i2v", marks=pytest.mark.long),
        *(pytest.param(name, marks=MORE) for name in CASES if name not in (QUICK, "wan-i2v")),
    ],
)
def test_the_estimate_is_what_a_rank_holds_and_allocates(tmp_path: Path, name: str) -> None:
    estimated, model = _loaded(tmp_path, name)
    prepared = model.prepare(photograph()) if CASES[name][2] else {}

    def encode() -> Any:
        model._texts.clear()  # a prompt that is not cached
        return model.encode(prepared, request_of())

    packet = encode()
    last = {**packet, **model.denoise(packet, 0, 2, nothing)}
    works: dict[str, Callable[[], object]] = {
        "encode": encode,
        "denoise": lambda: model.denoise(packet, 0, 2, nothing),
        "decode": lambda: model.decode(last),
    }
    for part, work in works.items():
        memory, measured = getattr(estimated, part), allocated_peak(work)
        print(name, part, memory.activation_bytes, measured, memory.activation_bytes / measured)
        if part == "encode" and not prepared:  # the text encoder's weights dominate
            measured += memory.weight_bytes
            assert memory.peak_bytes == pytest.approx(measured, rel=0.15)
        else:
            assert memory.activation_bytes == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_weights_that_stay_in_float32_count_in_float32(tmp_path: Path, dtype: Any) -> None:
    """transformers keeps some of T5 in fp16 alone, diffusers some of Wan in both."""
    checkpoint = read_folder(save_tiny_wan(tmp_path))
    model = model_of(checkpoint, dtype)
    sampling = checkpoint.resolve(WanSampling(**SIZES))
    estimated = estimate(checkpoint, model, sampling, device="cpu")
    for part, component in (("encode", "text_encoder"), ("denoise", "transformer")):
        roles = Roles(**{each: each == part for each in ("encode", "denoise", "decode")})
        module = loaded(load_model(checkpoint, model, sampling, "cpu", roles))[component]
        dtypes = {tensor.dtype for tensor in module.parameters()}
        assert (torch.float32 in dtypes) == (dtype == "fp16" or component == "transformer")
        assert getattr(estimated, part).weight_bytes == num_bytes([module])
