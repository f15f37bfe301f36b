"""What a call of a range of steps refuses, and what a packet holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput

from svdpp.config import WanSampling
from svdpp.errors import ModelError
from svdpp.models.base import Tensors
from svdpp.models.engine.model import EngineModel, load_model
from svdpp.models.engine.values import NotPackableError, Packer, tensors_in, unpack
from svdpp.plan.layout import Roles
from tests.models.range_checks import model_of, nothing, read_folder, request_of
from tests.models.tiny_families import save_tiny_wan

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
ALL = Roles(encode=True, denoise=True, decode=True)
STEPS = 4
SAMPLING = WanSampling(
    num_inference_steps=STEPS, height=32, width=32, num_frames=5, max_sequence_length=8
)


@pytest.fixture
def model(tmp_path: Path) -> EngineModel:
    checkpoint = read_folder(save_tiny_wan(tmp_path))
    return load_model(checkpoint, model_of(checkpoint), SAMPLING, "cpu", ALL)


def _half(model: EngineModel) -> Tensors:
    return model.denoise(model.encode({}, request_of()), 0, 2, nothing)


def test_draws_from_the_global_generator_are_refused(
    model: EngineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_prompt = model._pipe.encode_prompt
    monkeypatch.setattr(
        model._pipe, "encode_prompt", lambda **options: (torch.rand(1), encode_prompt(**options))[1]
    )
    with pytest.raises(ModelError, match="from torch's global generator"):
        model.encode({}, request_of())


def test_a_pipeline_that_does_not_reach_the_step_is_refused(model: EngineModel) -> None:
    with pytest.raises(ModelError, match="ends before step 9"):
        model.denoise(_half(model), 2, 9, nothing)


def test_values_come_back_with_their_order_in_memory() -> None:
    packer = Packer()
    tensor = torch.arange(12.0).view(3, 4).t()
    value = {"a": (tensor, None, [True, 2.5]), "b": tensor, "c": "text"}
    node = json.loads(json.dumps(packer.pack(value, "x")))
    assert list(packer.tensors) == ["x.a.0"]  # the tensor is in both places
    back = unpack(node, packer.tensors, CPU)
    assert (back["a"][1:], back["c"]) == ((None, [True, 2.5]), "text")
    for each in (back["a"][0], back["b"]):
        assert torch.equal(each, tensor)
        assert each.stride() == tensor.stride()
    with pytest.raises(NotPackableError, match=r"x\.a is a set"):
        packer.pack({"a": {1}}, "x")


@pytest.mark.parametrize("name", ["os:system", "diffusers.utils:logging", "diffusers:WanPipeline"])
def test_a_structure_names_no_class_but_outputs_of_the_libraries(name: str) -> None:
    with pytest.raises((ValueError, TypeError), match="class"):
        unpack({"kind": "output", "class": name, "items": {}}, {}, CPU)


def test_a_distribution_of_latents_is_recorded() -> None:
    value = AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(torch.ones(1, 4, 2, 2)))
    assert tensors_in(value)
    packer = Packer()
    back = unpack(packer.pack(value, "x"), packer.tensors, CPU)
    assert torch.equal(back.latent_dist.mode(), value.latent_dist.mode())
