"""Types in the interface between a rank and its model: tensors by name, sound, callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from PIL import Image

#: Names of the tensors in a packet. A packet is the state of a clip that one rank sends to the
#: next: the latent, the scheduler's state, the random generator's state, results of the encode, and
#: the structure (JSON in host memory, which describes all tensors and contains the plain values).
#: The two ranks of a pair also exchange the denoiser's output (`prediction`) in each step. If a
#: packet has several tensors of one kind, their names begin with the name of the kind, as in
#: `scheduler.1`.
LATENTS, STATE, PREDICTION = "latents", "scheduler", "prediction"
GENERATOR, STRUCTURE = "generator", "structure"
#: Names of the tensors that a rank returns when it decodes a part of a clip: one tensor `frames`,
#: or a tensor for each VAE tile (`tile.0`, `tile.1`, ...).
FRAMES, TILE = "frames", "tile"

#: Tensors by name, such as the contents of a packet, or SVD's input image after `prepare`.
Tensors = dict[str, torch.Tensor]

#: Visual input of a clip: an image; the frames of a video; or several images and videos by name,
#: such as `image` and `last_image`.
ModelInput = Image.Image | list[Image.Image] | dict[str, Image.Image | list[Image.Image]]

#: Visual input of a clip after `prepare`: tensors for SVD, an unchanged `ModelInput` for other
#: families, and an empty dict for clips from text.
PreparedInput = ModelInput | Tensors

#: torch's dtypes by the names that options and configs use for them.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Audio(NamedTuple):
    """Sound of a clip: its samples, and their rate."""

    samples: torch.Tensor
    """Sound samples, (N, channels), int16."""
    rate: int
    """Sampling rate in samples per second."""


#: Callback after each step. Its arguments are the step's index and the new latent. If it raises an
#: exception, no further steps run.
AfterStep = Callable[[int, torch.Tensor], None]


class Partner(Protocol):
    """Interface to the other rank of a pair. The two ranks divide the work of each step."""

    branch: int
    """Position of this rank in the pair, 0 or 1. If the guidance has two branches, the rank with 0
    evaluates the branch that the pipeline evaluates first (or puts first in the batch), and the
    rank with 1 evaluates the other branch. If there are more branches, the two ranks take turns."""

    def exchange(self, step: int, evaluate: Callable[[], Tensors]) -> Tensors:
        """Compute this rank's tensors, and exchange them for those of the pair's other rank.

        Args:
            step: Index of the step, which must be the same on both ranks.
            evaluate: Function that computes this rank's tensors.

        Returns:
            The partner's tensors, with the same names, shapes and dtypes.
        """
        ...
