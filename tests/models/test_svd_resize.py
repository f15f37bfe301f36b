"""The resize for CLIP has the bits of diffusers' own, in a small part of its time and memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.stable_video_diffusion.pipeline_stable_video_diffusion import (
    _resize_with_antialiasing,
)
from PIL import Image

from svdpp.models.engine.model import resize_for_clip


def _image(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(width * height).integers(0, 256, (height, width, 3))
    return Image.fromarray(noise.astype(np.uint8))


@pytest.mark.parametrize(
    "size",
    [
        *((131, 97), (16, 256), (64, 64), (223, 225), (224, 224), (256, 256), (257, 257)),
        *((449, 447), (500, 300), (1024, 576), (333, 700), (200, 3000), (1201, 1025)),
        pytest.param((4000, 3000), marks=pytest.mark.long),
    ],
)
def test_the_bits_are_those_of_diffusers_with_any_number_of_threads(size: tuple[int, int]) -> None:
    """So on CUDA threads do not matter: the rest of a clip is computed on the device."""
    image, before, found = _image(*size), torch.get_num_threads(), list[torch.Tensor]()
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        # As `_encode_image` of diffusers calls it.
        pixels = VaeImageProcessor.numpy_to_pt(VaeImageProcessor.pil_to_numpy(image))
        found += [_resize_with_antialiasing(pixels * 2.0 - 1.0, (224, 224)), resize_for_clip(image)]
    torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


_PEAK = """
import resource
from PIL import Image
from svdpp.models.engine.model import resize_for_clip
resize_for_clip(Image.new("RGB", (600, 400)))
image = Image.new("RGB", (6000, 4000))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
resize_for_clip(image)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.long
def test_24_megapixels_take_less_than_a_quarter_of_a_gibibyte() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", _PEAK], capture_output=True, text=True, timeout=300, check=True
    )
    assert int(answer.stdout) < 2**18, "KiB; diffusers' own takes 3.7 GiB"
