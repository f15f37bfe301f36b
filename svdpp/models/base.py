"""Owns the interfaces that every model family implements: sampler, denoiser, video model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from svdpp.config import SamplingConfig, TensorSpec

#: Name of the latent in a packet. Each step replaces this tensor; the others stay the same.
LATENTS = "latents"

#: Tensors by name: the contents of a packet, or a prepared image.
Tensors = dict[str, torch.Tensor]

#: Decoded frames on the host: uint8 RGB, shape (F, H, W, 3).
Frames = NDArray[np.uint8]


class Sampler(Protocol):
    """Runs the denoising steps of one clip in order."""

    def forward(self, latent: torch.Tensor, step: int) -> torch.Tensor:
        """Returns the latent after `step`, of the same shape and dtype; does not change `latent`.

        The caller runs each step once, in rising order, beginning with the sampler's start step.
        """
        ...


class Denoiser(Sampler, Protocol):
    """A sampler that also returns the derivative; holds the inputs that all steps share.

    It integrates dx/dsigma = f(x, sigma) by Euler's method, from noise level to noise level (EDM,
    arXiv:2206.00364, algorithm 1 without churn): x + f * (sigmas[step + 1] - sigmas[step]).
    """

    @property
    def sigmas(self) -> torch.Tensor:
        """Noise level before each step and after the last one: (N + 1,), float32, on the CPU."""
        ...

    def evaluate(self, latent: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the same bits as `forward`, and the derivative f at `latent` in float32."""
        ...


class VideoModel(Protocol):
    """The model of one rank: the components that its actions need, on its device."""

    device: torch.device

    def with_sampling(self, sampling: SamplingConfig) -> VideoModel:
        """Returns the same loaded components with other sampling parameters."""
        ...

    def packet_spec(self) -> Mapping[str, TensorSpec]:
        """Name, shape and dtype of each tensor in a packet, in packet order."""
        ...

    def prepare(self, image: Image.Image) -> Tensors:
        """Runs the part of the encode that needs no device, on an upright RGB image.

        Returns CPU tensors. It may run in a thread while the rank denoises another clip.
        """
        ...

    def encode(self, prepared: Tensors, seed: int) -> Tensors:
        """Returns the tensors for the first step.

        Args:
            prepared: the result of `prepare`; empty for a model without an image.
            seed: of the noise.
        """
        ...

    def denoiser(self, tensors: Tensors, start: int) -> Denoiser:
        """Returns a denoiser for one clip; `start` is its first step."""
        ...

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """Returns the frames of a final latent: (F, H, W, 3), uint8 RGB, on the device."""
        ...

    @property
    def frames_shape(self) -> tuple[int, int, int, int]:
        """Shape of the decoded frames: F, H, W, 3."""
        ...
