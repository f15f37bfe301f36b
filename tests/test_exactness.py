"""Our encode, steps and decode against diffusers' unmodified `__call__`: equal bits, cut anywhere.

These guard the private methods that `models/encode.py` and `models/decode.py` lean on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from svdpp.config import ClipRequest, ModelConfig, SamplingConfig, SvdSampling
from svdpp.media.image import fit_photo, read_photo
from svdpp.models.base import LATENTS
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.svd.decode import stack_frames, to_bytes
from svdpp.models.svd.model import SvdModel, load_svd
from svdpp.plan.layout import Roles
from tests.models.builders import save_tiny_checkpoint
from tests.models.diffusers_pipeline import latents_and_frames

PHOTO = Path(__file__).parent.parent / "svdpp/assets/photos/chelsea.jpg"
STEPS = 5
SMALL = SvdSampling(num_inference_steps=STEPS, height=64, width=64, num_frames=4)


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


def _ours(model: ModelConfig, sampling: SamplingConfig) -> SvdModel:
    checkpoint = find_checkpoint(model)
    sampling = sampling.resolved(model_frames=checkpoint.num_frames)
    roles = Roles(encode=True, denoise=True, decode=True)
    return load_svd(checkpoint, model, sampling, "cpu", roles)


def _photo() -> Image.Image:
    return read_photo(PHOTO)[0]


def _assert_equal(model: ModelConfig, sampling: SamplingConfig, *, seed: int = 7) -> None:
    image = fit_photo(_photo(), sampling.width, sampling.height, sampling.fit)
    theirs, their_frames = latents_and_frames(model, sampling, ClipRequest(seed=seed), image)
    ours = _ours(model, sampling)
    tensors = ours.encode(ours.prepare(image), ClipRequest(seed=seed))
    probe = ours.probe_packet()
    assert tensors.keys() == probe.keys()
    for name, tensor in tensors.items():
        assert (tensor.shape, tensor.dtype) == (probe[name].shape, probe[name].dtype), name
    # A new denoiser for every step: the clip is cut at every place at once.
    latent = tensors[LATENTS]
    for step, expected in enumerate(theirs):
        latent = ours.denoiser(tensors, step).forward(latent, step)
        assert torch.equal(latent, expected), f"step {step} differs"
    assert np.array_equal(ours.decode({LATENTS: latent}).numpy(), their_frames)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"width": 96, "height": 64, "fps": 24, "motion_bucket_id": 200},
        {"num_frames": 3, "decode_chunk_size": 2},
        {"noise_aug_strength": 0.5, "min_guidance_scale": 2.0, "max_guidance_scale": 1.5},
        {"max_guidance_scale": 1.0},
        {"max_guidance_scale": 0.5, "min_guidance_scale": 0.5},
        {"num_inference_steps": 1},
        {"num_frames": 1, "max_guidance_scale": 1.0},
        {"fit": "crop", "width": 128},
        {"fit": "pad", "width": 128},
    ],
    ids=str,
)
def test_every_knob_gives_diffusers_bits(tiny: Path, changes: dict[str, Any]) -> None:
    _assert_equal(ModelConfig(name=str(tiny)), replace(SMALL, **changes))


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_every_precision_gives_diffusers_bits(tiny: Path, dtype: Any) -> None:
    # fp16 takes the path on which diffusers lifts the VAE to float32 for the encode.
    _assert_equal(ModelConfig(name=str(tiny), dtype=dtype), SMALL)


@pytest.mark.long
@pytest.mark.parametrize("vae_factor", [2, 4])
def test_other_vaes_give_diffusers_bits(tmp_path: Path, vae_factor: int) -> None:
    folder = save_tiny_checkpoint(tmp_path / "model", vae_factor=vae_factor, num_frames=3, seed=3)
    sampling = replace(SMALL, num_frames=None, height=32, width=48)
    _assert_equal(ModelConfig(name=str(folder)), sampling)


def test_memory_saving_gives_the_bits_of_diffusers_own(tiny: Path) -> None:
    sampling = replace(SMALL, decode_chunk_size=2)
    _assert_equal(ModelConfig(name=str(tiny), memory_opt=True), sampling)


def test_a_rank_between_needs_the_unet_alone(tiny: Path) -> None:
    model, image = ModelConfig(name=str(tiny)), _photo()
    checkpoint = find_checkpoint(model)
    sampling = SMALL.resolved(model_frames=checkpoint.num_frames)

    def load(**roles: bool) -> SvdModel:
        nothing = {"encode": False, "denoise": False, "decode": False}
        return load_svd(checkpoint, model, sampling, "cpu", Roles(**{**nothing, **roles}))

    whole = load(encode=True, denoise=True, decode=True)
    tensors = whole.encode(whole.prepare(image), ClipRequest(seed=1))
    encoder = load(encode=True)
    for name, tensor in encoder.encode(encoder.prepare(image), ClipRequest(seed=1)).items():
        assert torch.equal(tensor, tensors[name]), name
    latent = whole.denoiser(tensors, 0).forward(tensors[LATENTS], 0)
    between = load(denoise=True).denoiser(tensors, 0).forward(tensors[LATENTS], 0)
    assert torch.equal(between, latent)
    assert torch.equal(load(decode=True).decode({LATENTS: latent}), whole.decode({LATENTS: latent}))


def test_steps_out_of_order_are_a_programmers_error(tiny: Path) -> None:
    ours = _ours(ModelConfig(name=str(tiny)), SMALL)
    tensors = ours.encode(ours.prepare(_photo()), ClipRequest(seed=1))
    with pytest.raises(AssertionError, match="expected step 2, got 3"):
        ours.denoiser(tensors, 2).forward(tensors[LATENTS], 3)


def test_a_step_leaves_its_input_alone(tiny: Path) -> None:
    ours = _ours(ModelConfig(name=str(tiny)), SMALL)
    tensors = ours.encode(ours.prepare(_photo()), ClipRequest(seed=1))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    ours.denoiser(tensors, 0).forward(tensors[LATENTS], 0)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name]), name


def test_frames_become_bytes_as_diffusers_makes_them() -> None:
    """Halves among them, which are rounded to even."""
    pixels = torch.linspace(0, 1, 2 * 255 * 3 + 1).repeat(9)[: 3 * 64 * 64].view(1, 3, 64, 64)
    pixels[0, 0, :2] = (torch.arange(128).view(2, 64) + 0.5) / 255
    theirs = stack_frames(VaeImageProcessor.numpy_to_pil(VaeImageProcessor.pt_to_numpy(pixels)))
    assert np.array_equal(to_bytes(pixels).numpy(), theirs)


@pytest.mark.parametrize("size", [(131, 97), (224, 224), (640, 427)])
def test_the_resize_on_the_cpu_has_the_same_bits_with_any_number_of_threads(
    tiny: Path, size: tuple[int, int]
) -> None:
    """So on CUDA threads do not matter: the rest of a clip is computed on the device."""
    ours, before = _ours(ModelConfig(name=str(tiny)), SMALL), torch.get_num_threads()
    image = _photo().resize(size)
    try:
        prepared = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            prepared.append(ours.prepare(image))
    finally:
        torch.set_num_threads(before)
    for name, tensor in prepared[0].items():
        assert all(torch.equal(each[name], tensor) for each in prepared[1:]), name
