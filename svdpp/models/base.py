"""Types that a rank and its model exchange: tensors by name, sound, calls between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from PIL import Image

#: Names of a packet's tensors, or their beginnings: the latent, the scheduler's state, what a
#: denoiser's call returns, the random generator's state, and the structure, JSON in host memory.
LATENTS, STATE, PREDICTION = "latents", "scheduler", "prediction"
GENERATOR, STRUCTURE = "generator", "structure"

#: Tensors by name: the contents of a packet, or a prepared image of SVD.
Tensors = dict[str, torch.Tensor]

#: Input of a clip besides a prompt: an image, the frames of a video, or several of both by
#: the arguments of `__call__`.
ModelInput = Image.Image | list[Image.Image] | dict[str, Image.Image | list[Image.Image]]

#: The same as a rank has prepared it: tensors, or unchanged; an empty one if there is nothing.
PreparedInput = ModelInput | Tensors

#: torch's dtypes by the names of options and configs.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Audio(NamedTuple):
    """Sound of a clip."""

    samples: torch.Tensor
    """(N, channels), int16."""
    rate: int
    """Samples a second."""


#: Called after each step with the step's index and the new latent. What it raises ends the steps.
AfterStep = Callable[[int, torch.Tensor], None]


class Partner(Protocol):
    """Other rank of a pair, which evaluates the other branch of the guidance."""

    branch: int
    """Branch that this rank evaluates: 0, which the pipeline evaluates first, or 1."""

    def exchange(self, step: int, evaluate: Callable[[], Tensors]) -> Tensors:
        """Send what `evaluate` computes, and receive the other rank's.

        Args:
            step: Index of the step, which must be that of the other rank.
            evaluate: Function that computes this rank's tensors.

        Returns:
            The other rank's tensors, of the same names, shapes and dtypes.
        """
        ...
