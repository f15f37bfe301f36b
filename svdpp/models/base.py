"""Owns the contracts between diffusion and the engine: a sampler, and the model of a rank."""

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

#: Tensors by name: what travels with a clip (`latents` among them), or a prepared image.
Tensors = dict[str, torch.Tensor]

#: Decoded frames on the host: uint8 RGB, shape (F, H, W, 3).
Frames = NDArray[np.uint8]


class Sampler(Protocol):
    """Does one clip's steps, one after the other."""

    def forward(self, latent: torch.Tensor, step: int) -> torch.Tensor:
        """The latent after `step`, of the same shape and dtype; `latent` is not changed.

        Steps are asked for in rising order, without gaps, from the one the sampler was made for.
        """
        ...


class Denoiser(Sampler, Protocol):
    """One clip's sampler with its derivative; what is the same for all steps is inside.

    It integrates dx/dsigma = f(x, sigma) by Euler's method, from noise level to noise level (EDM,
    arXiv:2206.00364, algorithm 1 without churn): x + f * (sigmas[step + 1] - sigmas[step]).
    """

    @property
    def sigmas(self) -> torch.Tensor:
        """Noise level before each step, and after the last: (N + 1,), float32, on the CPU."""
        ...

    def evaluate(self, latent: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same bits as `forward`, and the derivative f at `latent`, in float32."""
        ...


class VideoModel(Protocol):
    """What a rank holds: the parts for its share of the work, on its device."""

    device: torch.device

    def packet_spec(self) -> Mapping[str, TensorSpec]:
        """Name, shape and dtype of everything that travels with a clip, in packet order."""
        ...

    def prepare(self, image: Image.Image) -> Tensors:
        """The part of the encode that needs no device, from an upright RGB image.

        CPU tensors. Called in a thread beside the denoising.
        """
        ...

    def encode(self, prepared: Tensors, seed: int) -> Tensors:
        """What the first step needs, from what `prepare` made (or nothing) and a seed."""
        ...

    def denoiser(self, tensors: Tensors, start: int) -> Denoiser:
        """A sampler for one clip, whose first step is `start`."""
        ...

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """The frames of a final latent: (F, H, W, 3), uint8 RGB, on the device."""
        ...

    @property
    def frames_shape(self) -> tuple[int, int, int, int]:
        """The shape that `decode` gives: F, H, W, 3."""
        ...
