"""Memory estimates of 15 set-ups of eleven rows: exact for weights, within 10% for activations.

The figure to compare with is what torch's allocator allocates in a rank's own encode, two steps and
decode, and what the rank has received. The clips are large enough that activations dominate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from svdpp.models.base import Tensors
from svdpp.models.engine.model import load_model
from svdpp.models.engine.values import tensors_in
from svdpp.models.memory import estimate
from svdpp.plan.layout import Roles
from tests.models.allocator import allocated_peak, num_bytes
from tests.models.range_checks import loaded, nothing, source
from tests.models.test_rows import CASES, Rows

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

#: Side, frames and tokens of each clip.
SIZES = {
    "svd": (128, 4, None),
    "wan-image-bf16": (160, 13, 256),
    "ltx-image": (192, 17, 256),
    "ltx2": (64, 9, 256),
    "hunyuan-video-image": (128, 9, 420),
    "wan-animate": (96, 9, 256),
    "cogvideox-image": (96, 9, 64),
    "mochi": (128, 7, 256),
    "wan": (160, 13, 256),
    "wan-2.1-image": (160, 13, 256),
    "wan-5b-image": (192, 13, 256),
    "ltx-timestep": (192, 17, 256),
    "ltx-condition-image": (96, 9, 256),
    "wan-vace-image": (96, 9, 256),
    "skyreels-v2": (160, 13, 256),
    "framepack": (96, 37, 8),
}
ONE_OF_EACH = list(SIZES)[:7]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ONE_OF_EACH else [pytest.mark.full]) for name in SIZES],
)
def test_the_estimate_is_what_a_rank_receives_and_allocates(rows: Rows, name: str) -> None:
    case, (side, frames, tokens) = CASES[name], SIZES[name]
    sizes = {"height": side, "width": side, "num_frames": frames, "num_inference_steps": 2}
    more = {} if tokens is None else {"max_sequence_length": tokens}
    checkpoint, named = rows(name).checkpoint, rows(name).model
    sampling = checkpoint.resolve(case.config(**sizes, **more))
    experts = frozenset(range(checkpoint.num_experts))
    roles = Roles(encode=True, denoise=True, decode=True, experts=experts)
    model = load_model(checkpoint, named, sampling, "cpu", roles)
    prepared = model.prepare(source(sampling)) if case.image else {}
    request = rows(name).request("a cat")

    def encode() -> Any:
        model._texts.clear()  # a prompt that is not cached
        return model.encode(prepared, request)

    packet = encode()
    last = {**packet, **model.denoise(packet, 0, 2, nothing)}
    works: dict[str, tuple[Tensors, Callable[[], object]]] = {
        "encode": (prepared, encode),
        "denoise": (packet, lambda: model.denoise(packet, 0, 2, nothing)),
        "decode": (last, lambda: model.decode(last)),
    }
    estimated = estimate(checkpoint, named, sampling, device="cpu")
    for part, (received, work) in works.items():
        activations = getattr(estimated, part).activation_bytes
        measured = allocated_peak(work) + sum(tensor.nbytes for tensor in tensors_in(received))
        print(f"{name} {part} {activations} {measured} {activations / measured:.3f}")
        assert activations == pytest.approx(measured, rel=0.1), part


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_weights_that_stay_in_float32_count_in_float32(rows: Rows, dtype: Any) -> None:
    """transformers keeps some of T5 in fp16 alone, diffusers some of Wan in both."""
    row = rows("wan")
    model = replace(row.model, dtype=dtype)
    estimated = estimate(row.checkpoint, model, row.sampling, device="cpu")
    for part, component in (("encode", "text_encoder"), ("denoise", "transformer")):
        held = load_model(row.checkpoint, model, row.sampling, "cpu", Roles(**{part: True}))
        module = loaded(held)[component]
        dtypes = {tensor.dtype for tensor in module.parameters()}
        assert (torch.float32 in dtypes) == (dtype == "fp16" or component == "transformer")
        assert getattr(estimated, part).weight_bytes == num_bytes([module])
