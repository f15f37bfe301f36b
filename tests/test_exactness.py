"""Stable Video Diffusion in the engine: the bits of diffusers' `__call__`, for every option."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.stable_video_diffusion.pipeline_stable_video_diffusion import (
    _resize_with_antialiasing,
)
from PIL import Image

from svdpp.config import ClipRequest, ModelConfig, SvdSampling
from svdpp.media.images import fit_image, read_image
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine.factory import load_engine_model
from svdpp.models.engine.model import resize_for_clip, to_uint8
from svdpp.plan.roles import Roles
from svdpp.verification.reference import stack_frames
from tests.support.allocations import allocated_peak
from tests.support.builders import save_tiny_checkpoint
from tests.support.range_checks import check_every_cut, nothing, ranks, whole_clip

pytestmark = pytest.mark.usefixtures("one_thread")

PHOTO = Path(__file__).parent.parent / "svdpp/assets/photos/chelsea.jpg"
SMALL = SvdSampling(num_inference_steps=3, height=64, width=64, num_frames=4)
REQUEST = ClipRequest(seed=7)
FULL = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


def _photo(sampling: SvdSampling = SMALL) -> Image.Image:
    return fit_image(read_image(PHOTO)[0], sampling.width, sampling.height, sampling.fit)


def _assert_equal(model: ModelConfig, sampling: SvdSampling) -> None:
    image = _photo(sampling)
    checkpoint = find_checkpoint(model)
    sampling = checkpoint.resolve_sampling(sampling)
    theirs = whole_clip(model, sampling, REQUEST, image)
    rank_for = ranks(checkpoint, sampling, model=model)
    check_every_cut(rank_for, sampling.num_inference_steps, theirs, REQUEST, image)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ({}, {}),
        pytest.param(
            {},
            {"width": 96, "height": 64, "fps": 23.976, "motion_bucket_id": 200},
            marks=FULL,
        ),
        pytest.param({}, {"num_frames": 3, "decode_chunk_size": 2}, marks=pytest.mark.slow),
        pytest.param(
            {},
            {"noise_aug_strength": 0.5, "min_guidance_scale": 2.0, "max_guidance_scale": 1.5},
            marks=pytest.mark.slow,
        ),
        pytest.param({}, {"max_guidance_scale": 1.0}, marks=pytest.mark.slow),
        pytest.param({}, {"max_guidance_scale": 0.5, "min_guidance_scale": 0.5}, marks=FULL),
        pytest.param({}, {"num_inference_steps": 1}, marks=FULL),
        pytest.param({}, {"num_frames": 1, "max_guidance_scale": 1.0}, marks=FULL),
        pytest.param({}, {"fit": "crop", "width": 128}, marks=pytest.mark.slow),
        pytest.param({}, {"fit": "pad", "width": 128}, marks=FULL),
        pytest.param({"memory_opt": True}, {"decode_chunk_size": 2}, marks=pytest.mark.slow),
        pytest.param({"channels_last": True}, {"decode_chunk_size": 2}, marks=pytest.mark.slow),
        # In fp16, diffusers converts the VAE to float32 for the encode.
        *(
            pytest.param(
                {"dtype": dtype}, {"max_guidance_scale": scale, "num_frames": 2}, marks=mark
            )
            for dtype in ("fp16", "bf16")
            for scale, mark in ((1.0, FULL), (3.0, pytest.mark.slow if dtype == "fp16" else FULL))
        ),
    ],
    ids=str,
)
def test_every_knob_gives_diffusers_bits(
    tiny: Path, model: dict[str, Any], changes: dict[str, Any]
) -> None:
    _assert_equal(ModelConfig(name=str(tiny), **model), replace(SMALL, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("vae_factor", [2, 4])
def test_other_vaes_give_diffusers_bits(tmp_path: Path, vae_factor: int) -> None:
    folder = save_tiny_checkpoint(tmp_path / "model", vae_factor=vae_factor, num_frames=3)
    sampling = replace(SMALL, num_frames=None, height=32, width=48)
    _assert_equal(ModelConfig(name=str(folder)), sampling)


@pytest.mark.slow
def test_one_rank_has_the_bits_of_several(tiny: Path) -> None:
    """One rank with all roles gives the same frames as a separate decode rank.

    In fp16, the encode converts the VAE that the decode uses too.
    """
    model = ModelConfig(name=str(tiny), dtype="fp16")
    checkpoint = find_checkpoint(model)
    sampling = checkpoint.resolve_sampling(replace(SMALL, num_frames=2))
    every, last = Roles(encode=True, denoise=True, decode=True), Roles(decode=True)
    whole, decoder = (
        load_engine_model(checkpoint, model, sampling, "cpu", r) for r in (every, last)
    )
    for _ in range(2):
        packet = whole.encode(whole.prepare(_photo()), REQUEST)
        packet = whole.denoise(packet, 0, 3, nothing)
        assert torch.equal(whole.decode(packet), decoder.decode(packet))


def test_frames_become_bytes_as_diffusers_makes_them() -> None:
    """Frames become bytes as in diffusers, where a fraction of 0.5 is rounded to an even number."""
    pixels = torch.linspace(0, 1, 2 * 255 * 3 + 1).repeat(9)[: 3 * 64 * 64].view(1, 3, 64, 64)
    pixels[0, 0, :2] = (torch.arange(128).view(2, 64) + 0.5) / 255
    theirs = stack_frames(VaeImageProcessor.numpy_to_pil(VaeImageProcessor.pt_to_numpy(pixels)))
    assert np.array_equal(to_uint8(pixels).numpy(), theirs)


# --- the resize for CLIP: the bits of diffusers, in a fraction of its time and memory -------------


@pytest.mark.parametrize(
    "size",
    [
        *((131, 97), (16, 256), (64, 64), (223, 225), (224, 224), (256, 256), (257, 257)),
        *((449, 447), (500, 300), (1024, 576), (333, 700)),
        *(pytest.param(size, marks=pytest.mark.slow) for size in ((200, 3000), (1201, 1025))),
        pytest.param((2400, 1800), marks=FULL),
    ],
)
def test_the_bits_are_those_of_diffusers_with_any_number_of_threads(size: tuple[int, int]) -> None:
    """The resize has the bits of diffusers with any number of threads.

    So the number of threads does not matter for clips on CUDA, whose other work is on the device.
    """
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image, before, found = Image.fromarray(noise), torch.get_num_threads(), list[torch.Tensor]()
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        # `_encode_image` of diffusers makes the same calls.
        pixels = VaeImageProcessor.numpy_to_pt(VaeImageProcessor.pil_to_numpy(image))
        found += [_resize_with_antialiasing(pixels * 2.0 - 1.0, (224, 224)), resize_for_clip(image)]
    torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.slow
@pytest.mark.full
def test_24_megapixels_take_a_tenth_of_the_memory_of_diffusers_own() -> None:
    image = Image.new("RGB", (6000, 4000))
    assert allocated_peak(lambda: resize_for_clip(image)) < 0.37 * 2**30
