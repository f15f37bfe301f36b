"""The interface between the engine and a model family: what one rank's model can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from svdpp.config import ClipRequest, SamplingConfig
from svdpp.plan.actions import FrameRange

#: Name of the latent in a packet.
LATENTS = "latents"

#: Beginning of the names of the tensors that hold the scheduler's state in a packet.
STATE_PREFIX = "scheduler."

#: Beginning of the names of the tensors that a denoiser's call returns, before the call's number.
PREDICTION = "prediction"

#: Name of the state of a random generator in a packet.
GENERATOR = "generator"

#: Tensors by name: the contents of a packet, or a prepared image.
Tensors = dict[str, torch.Tensor]

#: What a clip starts from besides a prompt: an image, or the frames of a video.
Source = Image.Image | list[Image.Image]

#: torch's dtypes by the names of options and configs.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

#: Decoded frames on the host: uint8 RGB, shape (F, H, W, 3).
Frames = NDArray[np.uint8]


class Audio(NamedTuple):
    """The sound of a clip."""

    samples: torch.Tensor
    """(N, channels), int16."""
    rate: int
    """Samples a second."""


#: Called after each step with the step's index and the new latent. What it raises ends the steps.
AfterStep = Callable[[int, torch.Tensor], None]


class Partner(Protocol):
    """The other rank of a pair, which evaluates the other branch of the guidance."""

    branch: int
    """The branch that this rank evaluates: 0, which the pipeline evaluates first, or 1."""

    def exchange(self, step: int, evaluate: Callable[[], Tensors]) -> Tensors:
        """Sends what `evaluate` computes for `step`; returns the other rank's, of equal shapes."""
        ...


class VideoModel(Protocol):
    """The model of one rank: the components that its actions need, on its device."""

    device: torch.device
    audio: Audio | None
    """Of the clip that was decoded last; None: the model makes no sound."""

    def with_sampling(self, sampling: SamplingConfig) -> VideoModel:
        """Returns the same loaded components with other sampling parameters."""
        ...

    def probe_packet(self, *, has_stepped: bool = False) -> Tensors:
        """A made-up packet with a real one's shapes, dtypes and devices, to measure without encode.

        With `has_stepped` it is one to decode, otherwise one before the first step.
        """
        ...

    def prepare(self, source: Source) -> Tensors:
        """Runs the part of the encode that needs no device, on upright RGB images.

        Returns CPU tensors. It may run in a thread while the rank denoises another clip.
        """
        ...

    def encode(self, prepared: Tensors, request: ClipRequest) -> Tensors:
        """Returns the tensors of the packet before the first step, of the result of `prepare`.

        A packet carries everything that later steps and the decode need: the latent, what the steps
        are conditioned on, and the scheduler's state if it has any.
        """
        ...

    def removed_text(self, prompt: str) -> str:
        """Returns the end of `prompt` that the model does not read; only on the encoding rank."""
        ...

    def denoise(
        self,
        tensors: Tensors,
        start: int,
        end: int,
        after_step: AfterStep,
        partner: Partner | None = None,
    ) -> Tensors:
        """Runs steps `start` to `end` (exclusive); returns the tensors of the packet after them.

        With a partner each step evaluates one branch, and both get the same result.

        Does not change `tensors`, the packet after `start` steps.
        """
        ...

    def decode(self, tensors: Tensors, frames: FrameRange | None = None) -> torch.Tensor:
        """Returns the frames of the packet after the last step: (F, H, W, 3), uint8 RGB.

        The frames are on the device; those of `frames` only, whole chunks, if it is given.
        """
        ...

    @property
    def frames_shape(self) -> tuple[int, int, int, int]:
        """Shape of the decoded frames: F, H, W, 3."""
        ...


def solver_history(tensors: Tensors) -> Tensors:
    """Those tensors of a packet that hold earlier samples or outputs of a multistep solver."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(STATE_PREFIX) and tensor.is_floating_point()
    }
