"""An image of SVD, resized before the encode, with the bits of `_resize_with_antialiasing`.

diffusers blurs the whole image, which takes 9 GiB for 50 megapixels, and then interpolates it. The
interpolation reads four rows and columns for each of the 224 of its result. This module blurs only
those, a band of rows at a time, by the same convolutions: they sum each pixel in the same order,
whichever others they compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch.nn import functional

from svdpp.models.base import Tensors
from svdpp.models.engine.patches import replaced

_CLIP_PIXELS, _VAE_PIXELS = "clip_pixels", "vae_pixels"
_SIDE = 224
_CHANNELS = 3
_BAND_ROWS = 256
_HEIGHT, _WIDTH = -2, -1
# Bicubic interpolation reads from one position before to two after the one below its own. One more
# on both sides, because torch computes its own in single precision.
_BEFORE, _AFTER = 2, 3


def resized(pipe: Any, image: Image.Image, sampling: Any) -> Tensors:
    """The pixels of an image of any size for CLIP, in [0, 1], and for the VAE, in [-1, 1]."""
    processor = pipe.video_processor
    # A call of the pipeline, perhaps in another thread, replaces the processor's own method.
    preprocess = type(processor).preprocess
    return {
        # As in `_encode_image`: from [-1, 1], in which it is resized, to [0, 1].
        _CLIP_PIXELS: (resize_for_clip(image) + 1.0) / 2.0,
        _VAE_PIXELS: preprocess(processor, image, height=sampling.height, width=sampling.width),
    }


@contextmanager
def resized_before(pipe: Any, pixels: Tensors) -> Iterator[None]:
    """While it lasts, the pipeline encodes `pixels`, of `resized`, in place of its image."""
    encode = pipe._encode_image

    def encode_image(_: Image.Image, *args: Any) -> Any:
        return encode(pixels[_CLIP_PIXELS], *args)

    with (
        replaced(pipe, _encode_image=encode_image),
        replaced(pipe.video_processor, preprocess=lambda *_, **__: pixels[_VAE_PIXELS]),
    ):
        yield


def resize_for_clip(image: Image.Image) -> torch.Tensor:
    """The pixels of `image` (RGB) in [-1, 1], blurred and interpolated to (1, 3, 224, 224)."""
    tops = range(0, image.height, _BAND_ROWS)
    across = torch.cat([_blurred(_pixels(image, top), _WIDTH) for top in tops], dim=_HEIGHT)
    down = _blurred(across, _HEIGHT)
    # Each pixel at its place, because the interpolation depends on the image's size. Rows that it
    # does not read take no memory.
    whole = torch.empty(1, _CHANNELS, image.height, image.width)
    rows, columns = (
        torch.cat([torch.arange(*span) for span in _spans(size)])
        for size in (image.height, image.width)
    )
    whole[..., rows, :] = torch.nan
    whole[..., rows[:, None], columns] = down
    return functional.interpolate(whole, size=(_SIDE, _SIDE), mode="bicubic", align_corners=True)


def _pixels(image: Image.Image, top: int) -> torch.Tensor:
    """A band of rows in [-1, 1], (1, 3, rows, W), as diffusers computes it."""
    band = image.crop((0, top, image.width, min(top + _BAND_ROWS, image.height)))
    pixels: torch.Tensor = VaeImageProcessor.numpy_to_pt(VaeImageProcessor.pil_to_numpy(band))
    return (pixels * 2.0 - 1.0).contiguous()  # the layout in which diffusers' convolutions run


def _blurred(pixels: torch.Tensor, dim: int) -> torch.Tensor:
    """`pixels` blurred along `dim`, where the interpolation reads."""
    # At the top, other families would import it too, and before `silence_libraries`.
    from diffusers.pipelines.stable_video_diffusion import pipeline_stable_video_diffusion as svd

    size = pixels.shape[dim]
    sigma = max((size / _SIDE - 1.0) / 2.0, 0.001)
    taps = int(max(4.0 * sigma, 3)) // 2 * 2 + 1
    shape = [1, 1]
    shape[dim] = taps
    kernel = (
        svd._gaussian(taps, torch.tensor([[sigma]])).view(1, 1, *shape).repeat(_CHANNELS, 1, 1, 1)
    )
    padded = functional.pad(pixels, svd._compute_padding(shape), mode="reflect")
    parts = [
        functional.conv2d(
            padded.narrow(dim, start, stop - start + taps - 1), kernel, groups=_CHANNELS
        )
        for start, stop in _spans(size)
    ]
    return torch.cat(parts, dim)


def _spans(size: int) -> list[tuple[int, int]]:
    """The positions along a side of `size` pixels that the interpolation reads.

    They are ranges (start, stop) that do not touch.
    """
    spans: list[tuple[int, int]] = []
    for index in range(_SIDE):
        below = index * (size - 1) // (_SIDE - 1)
        start, stop = max(0, below - _BEFORE), min(size, below + _AFTER + 1)
        if spans and start <= spans[-1][1]:
            start = spans.pop()[0]
        spans.append((start, stop))
    return spans
