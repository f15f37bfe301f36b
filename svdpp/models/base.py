"""Owns the contracts between diffusion and the engine: a denoiser, and the model a rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from svdpp.config import TensorSpec

#: The tensor that every packet holds and every step changes.
LATENTS = "latents"

#: What travels with a clip, by name; `latents` is among them.
Tensors = dict[str, torch.Tensor]

#: Decoded frames: uint8 RGB, shape (F, H, W, 3).
Frames = NDArray[np.uint8]


class Sampler(Protocol):
    """What does one clip's steps, one after the other."""

    def forward(self, latent: torch.Tensor, step: int) -> torch.Tensor:
        """The latent after step `step`, of the same shape and dtype; `latent` is left as it is.

        Steps are asked for in rising order, without gaps, from the one the sampler was made for.
        """
        ...


class Denoiser(Sampler, Protocol):
    """One clip's sampler: everything that stays the same over its steps is inside.

    It integrates dx/dsigma = f(x, sigma) by Euler's method, from noise level to noise level (EDM,
    arXiv:2206.00364, algorithm 1 without churn): x + f * (sigmas[step + 1] - sigmas[step]).
    """

    @property
    def sigmas(self) -> torch.Tensor:
        """Noise level before each step, and after the last: (N + 1,), float32, on the CPU."""
        ...

    def evaluate(self, latent: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What `forward` gives, bit for bit, and the derivative f at `latent`, in float32."""
        ...


class VideoModel(Protocol):
    """What a rank holds: the parts for its share of the work, on its device."""

    device: torch.device

    def packet_spec(self) -> Mapping[str, TensorSpec]:
        """Name, shape and dtype of everything that travels with a clip, in packet order."""
        ...

    def encode(self, image: Image.Image | None, seed: int) -> Tensors:
        """What the first step needs, from an upright RGB image (or none) and a seed."""
        ...

    def denoiser(self, tensors: Tensors, start: int) -> Denoiser:
        """A sampler for one clip, whose first step will be `start`."""
        ...

    def decode(self, latent: torch.Tensor) -> Frames:
        """The frames of a final latent."""
        ...

    @property
    def frames_shape(self) -> tuple[int, int, int, int]:
        """What `decode` gives: F, H, W, 3."""
        ...
