"""Owns the dummy model: a small Conv3d network with the denoiser's contract.

It stands in for SVD where the engine is what matters: rehearsals on a laptop, tests of the wires.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from PIL import Image
from torch import nn

from svdpp.config import LatentSpec, TensorSpec
from svdpp.models.interface import LATENTS, Frames, Tensors

_WEIGHT_SEED = 20231121


class DummyUNet(nn.Module):
    """Two Conv3d layers and a residual; the same weights in every process.

    Args:
        channels: of the latent, second of its axes B C F H W.
        hidden: channels between the two layers.
        num_steps: length of the schedule that `step` counts in.
    """

    def __init__(self, channels: int = 4, hidden: int = 16, num_steps: int = 28) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.widen = nn.Conv3d(channels, hidden, kernel_size=3, padding=1)
        self.narrow = nn.Conv3d(hidden, channels, kernel_size=3, padding=1)
        generator = torch.Generator().manual_seed(_WEIGHT_SEED)
        for parameter in self.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)

    def forward(self, latent: torch.Tensor, step: int) -> torch.Tensor:
        """One step: (B, C, F, H, W) to the same shape and dtype."""
        level = 1.0 - step / self.num_steps
        residual = self.narrow(torch.nn.functional.silu(self.widen(latent) + level))
        result: torch.Tensor = latent + residual / self.num_steps
        return result


class DummyModel:
    """The dummy behind the engine's contract. Encodes a seed, decodes nothing."""

    def __init__(self, spec: LatentSpec, num_steps: int, device: torch.device) -> None:
        self.device = device
        self._spec = spec
        self._dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[
            spec.dtype
        ]
        self._unet = DummyUNet(spec.shape[1], num_steps=num_steps).to(device, self._dtype).eval()
        self._unet.requires_grad_(False)

    def packet_spec(self) -> Mapping[str, TensorSpec]:
        """The latent alone."""
        return {LATENTS: TensorSpec(self._spec.shape, self._spec.dtype)}

    def encode(self, image: Image.Image | None, seed: int) -> Tensors:  # noqa: ARG002
        """Noise drawn on the CPU, so that every device starts from the same latent."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(self._spec.shape, generator=generator)
        return {LATENTS: noise.to(self.device, self._dtype)}

    def denoiser(self, tensors: Tensors, start: int) -> DummyUNet:  # noqa: ARG002
        """The network itself: it carries nothing from step to step."""
        return self._unet

    def decode(self, latent: torch.Tensor) -> Frames:
        """Not to be called: no plan for the dummy model has a DECODE."""
        raise AssertionError(f"the dummy model decodes nothing, got {tuple(latent.shape)}")
