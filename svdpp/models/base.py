"""Types in the interface between a rank and its model: tensors by name, sound, callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from PIL import Image

#: Names, or prefixes of names, of the tensors in a packet (the state of a clip that one rank sends
#: to the next): the latent, the scheduler's state, the denoiser's output, the random generator's
#: state, and the structure (JSON in host memory).
LATENTS, STATE, PREDICTION = "latents", "scheduler", "prediction"
GENERATOR, STRUCTURE = "generator", "structure"
#: Prefixes of the names of the tensors that the decode of a part of a clip returns: some of the
#: clip's frames, or some tiles.
FRAMES, TILE = "frames", "tile"

#: Tensors by name: the contents of a packet, or a prepared image of SVD.
Tensors = dict[str, torch.Tensor]

#: Visual input of a clip: an image; the frames of a video; or several images and videos by the
#: names of the pipeline's arguments.
ModelInput = Image.Image | list[Image.Image] | dict[str, Image.Image | list[Image.Image]]

#: Visual input of a clip after `prepare`: tensors for SVD, an unchanged `ModelInput` for other
#: families, and an empty dict for clips from text.
PreparedInput = ModelInput | Tensors

#: torch's dtypes by the names that options and configs use for them.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Audio(NamedTuple):
    """Sound of a clip."""

    samples: torch.Tensor
    """Sound samples, (N, channels), int16."""
    rate: int
    """Sampling rate in samples per second."""


#: Callback after each step, which gets the step's index and the new latent. An exception from the
#: callback ends the run of steps.
AfterStep = Callable[[int, torch.Tensor], None]


class Partner(Protocol):
    """Other rank of a pair: two ranks that run the same steps, each one branch of the guidance."""

    branch: int
    """Index of the guidance branch that this rank evaluates: 0 (the pipeline's first) or 1."""

    def exchange(self, step: int, evaluate: Callable[[], Tensors]) -> Tensors:
        """Compute this rank's tensors, send them to the partner rank, and receive the partner's.

        Args:
            step: Index of the step, which must be the same on both ranks.
            evaluate: Function that computes this rank's tensors.

        Returns:
            The partner's tensors, with the same names, shapes and dtypes.
        """
        ...
