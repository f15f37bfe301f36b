"""FLOPs from configs equal a hand count on a loaded model, within 2 %."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from svdpp.config import LtxSampling, ModelConfig, SvdSampling, WanSampling
from svdpp.diagnostics import utilisation as module
from svdpp.diagnostics.figures import figures_of
from svdpp.diagnostics.utilisation import (
    PartFlops,
    Speeds,
    count_flops,
    speeds_of,
    utilisation,
    why_no_mfu,
)
from svdpp.errors import ModelError
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine.model import load_model
from svdpp.models.memory import estimate
from svdpp.plan.layout import Roles
from tests.diagnostics.made_up_runs import replayed, with_rank
from tests.models.range_checks import model_of, nothing, read_folder, request_of
from tests.models.tiny_families import save_tiny_ltx, save_tiny_wan

pytestmark = pytest.mark.long

DEMO = ModelConfig(name="demo")
SAMPLING = SvdSampling(
    num_inference_steps=4, height=64, width=64, num_frames=6, decode_chunk_size=6
)


class HandCount:
    """Counts two FLOPs for each multiply-add, by the sizes of layers and attention matrices."""

    def __init__(self, module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flops = 0
        for layer in module.modules():
            if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                layer.register_forward_hook(self._count_layer)
        attend = functional.scaled_dot_product_attention

        def counted(query: Any, key: Any, value: Any, *args: Any, **more: Any) -> Any:
            batch, heads, length, size = query.shape
            # Scores and their product with the values, each length x keys x size multiply-adds.
            self.flops += 4 * batch * heads * length * key.shape[2] * size
            return attend(query, key, value, *args, **more)

        monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)

    def _count_layer(self, layer: nn.Module, _: Any, output: torch.Tensor) -> None:
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        # Every output element sums over a row of the weight: input channels x kernel.
        self.flops += 2 * output.numel() * weight[0].numel()


_FLOPS = functools.cache(lambda: count_flops(DEMO, SAMPLING))


@pytest.mark.parametrize("part", ["denoise", "decode"])
def test_a_part_equals_a_hand_count(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = Roles(encode=False, denoise=part == "denoise", decode=part == "decode")
    model = load_model(find_checkpoint(DEMO), DEMO, SAMPLING, "cpu", roles)
    packet = model.probe_packet(has_stepped=part == "decode")
    hand = HandCount(model._pipe.unet if roles.denoise else model._pipe.vae, monkeypatch)
    if roles.denoise:
        model.denoise(packet, 0, 1, nothing)
    else:
        model.decode(packet)
    assert hand.flops > 1e9
    flops = _FLOPS().step if roles.denoise else _FLOPS().decode
    assert flops == pytest.approx(hand.flops, rel=0.02)


SIZES: dict[str, Any] = {"num_frames": 9, "max_sequence_length": 8, "num_inference_steps": 2}


@pytest.mark.parametrize(
    ("save", "sampling"),
    [
        (save_tiny_wan, WanSampling(height=32, width=32, **SIZES)),
        (save_tiny_ltx, LtxSampling(height=64, width=96, **SIZES)),
    ],
    ids=["wan", "ltx"],
)
def test_a_step_of_a_family_with_prompts_equals_a_hand_count(
    save: Any, sampling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = read_folder(save(tmp_path))
    sampling, named = checkpoint.resolve(sampling), model_of(checkpoint)
    flops = module._counted(named, sampling)
    roles = Roles(encode=True, denoise=True, decode=True)
    model = load_model(checkpoint, named, sampling, "cpu", roles)
    tensors = model.encode({}, request_of())
    hand = HandCount(model._pipe.transformer, monkeypatch)

    model.denoise(tensors, 0, 1, nothing)

    assert flops.step == pytest.approx(hand.flops, rel=0.02)
    assert min(flops.encode, flops.decode) > 0
    figures = replayed(model=asdict(named), sampling=asdict(sampling))
    read_back = figures_of(json.loads(json.dumps({"measured": figures.to_json()})), "")
    assert len(speeds_of(figures).ranks) == len(speeds_of(read_back).ranks) == 2
    without = replace(sampling, guidance_scale=1.0)
    assert count_flops(named, without).step == pytest.approx(flops.step / 2, rel=0.02)


def test_flops_follow_the_request() -> None:
    def step(**changes: Any) -> int:
        sampling = SvdSampling(
            **{"height": 64, "width": 64, "num_frames": 6, "decode_chunk_size": 6, **changes}
        )
        return estimate(find_checkpoint(DEMO), DEMO, sampling, device="cpu").denoise.flops

    # Without guidance a step computes one half only.
    assert step(max_guidance_scale=1.0) == pytest.approx(_FLOPS().step / 2, rel=0.02)
    # Attention grows with the square of the size.
    assert 2 * _FLOPS().step < step(width=128) < 4 * _FLOPS().step


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (NotImplementedError("no fake kernel"), "FLOPs cannot be counted: no fake kernel"),
        (ModelError("it is gone"), "the run's model is not here any more"),
    ],
)
def test_flops_that_cannot_be_counted_are_a_note(
    error: Exception, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> PartFlops:
        raise error

    monkeypatch.setattr(module, "_counted", fail)
    figures = replayed(model=asdict(DEMO), sampling=asdict(SAMPLING))
    assert speeds_of(figures) == Speeds(note=f"no TFLOP/s: {note}")


def test_mfu_is_of_the_published_peak_and_missing_where_there_is_none() -> None:
    figures = replayed()
    (first, last), flops = figures.ranks, PartFlops(encode=10**12, step=10**12, decode=0)
    figures = with_rank(figures, 0, device_name="NVIDIA H100 80GB HBM3")

    on_h100, on_cpu = utilisation(figures.ranks, flops, "bf16")

    seconds, done = first.compute, first.step.count + first.encode.count
    assert on_h100.tflops == pytest.approx(done / seconds)
    assert on_h100.mfu == pytest.approx(done / seconds / 989.5)
    assert on_cpu.tflops == pytest.approx(last.step.count / last.compute)
    assert on_cpu.mfu is None
    note = why_no_mfu(figures.ranks, [on_h100, on_cpu])
    assert note == "no MFU: no published peak is known for cpu"
    assert why_no_mfu(figures.ranks, [on_h100]) == ""
