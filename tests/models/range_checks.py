"""Owns the comparison of ranks that run ranges of steps with the whole `__call__` of diffusers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from PIL import Image

from svdpp.config import TensorSpec
from svdpp.models.base import LATENTS, Tensors
from svdpp.models.svd.decode import to_bytes

DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "uint8",
    torch.int64: "int64",
    torch.bool: "bool",
}


@dataclass(frozen=True)
class Prompt:
    """A clip's request."""

    seed: int = 3
    prompt: str | None = "a cat walks over the grass"
    negative_prompt: str | None = None


def photograph() -> Image.Image:
    """A picture that fits no size of the tests."""
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def nothing(_: int, __: torch.Tensor) -> None:
    """Does nothing after a step."""


def run_reference(reference: tuple[Any, dict[str, Any]]) -> tuple[list[torch.Tensor], Any]:
    """The latents after each step, and the frames, of the unmodified pipeline."""
    pipe, arguments = reference
    latents: list[torch.Tensor] = []

    def keep(_: Any, __: int, ___: Any, values: dict[str, Any]) -> dict[str, Any]:
        latents.append(values[LATENTS].clone())
        return {}

    video = pipe(**arguments, callback_on_step_end=keep, output_type="pt").frames
    return latents, to_bytes(video[0].float())


def run_ranges(
    rank_for: Callable[[int, int], Any],
    cuts: list[int],
    request: Prompt,
    image: Image.Image | None,
) -> tuple[list[torch.Tensor], Any]:
    """The same from models that each run the steps between two cuts.

    Args:
        rank_for: returns the model for steps `start` to `end`.
        cuts: rising, from 0 to the number of steps.
        request: of the clip.
        image: of the clip.
    """
    latents: list[torch.Tensor] = []

    def keep(step: int, latent: torch.Tensor) -> None:
        assert step == len(latents)
        latents.append(latent.clone())

    first = rank_for(0, cuts[1])
    tensors = first.encode({} if image is None else first.prepare(image), request)
    assert_spec(tensors, first.packet_spec(0))
    model = first
    for start, end in pairwise(cuts):
        model = rank_for(start, end)
        received = travelled(tensors)
        tensors = model.denoise(received, start, end, keep)
        assert_equal(received, travelled(received))
        assert_spec(tensors, model.packet_spec(end))
    return latents, model.decode(travelled(tensors))


def assert_spec(tensors: Tensors, specs: Any) -> None:
    """Fails unless the tensors are those that the packet announces, in its order."""
    found = {
        name: TensorSpec(tuple(tensor.shape), DTYPES[tensor.dtype])
        for name, tensor in tensors.items()
    }
    assert list(found.items()) == list(specs.items())
    # A transfer makes them contiguous, so others could change the bits.
    assert all(tensor.is_contiguous() for tensor in tensors.values())


def travelled(tensors: Tensors) -> Tensors:
    """Copies, as a receiver gets them."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_same_clip(ours: tuple[list[torch.Tensor], Any], theirs: Any) -> None:
    """Fails unless latents and frames have the same bits, and the latents the same strides."""
    assert len(ours[0]) == len(theirs[0])
    for step, (our, their) in enumerate(zip(ours[0], theirs[0], strict=True)):
        assert our.dtype == their.dtype
        assert torch.equal(our, their), f"step {step}"
        # Strides of an axis of one element mean nothing; the first is such an axis.
        assert our.stride()[1:] == their.stride()[1:], f"step {step}"
    assert torch.equal(ours[1], theirs[1])


def assert_equal(ours: Tensors, theirs: Tensors) -> None:
    """Fails unless both hold the same bits."""
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
