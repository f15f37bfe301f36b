"""What the engine asks of a model family, and finds the family of a checkpoint.

SVD has a package of its own; the other families share the engine's. Both have three modules:
`family` has the functions below, `checkpoint` checks configs without torch, and `memory` estimates
the memory of the parts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from PIL import Image

from svdpp.config import ClipRequest, ModelConfig, SamplingConfig
from svdpp.models.base import Audio, Frames, Tensors, VideoModel
from svdpp.models.checkpoint import Checkpoint, package_of
from svdpp.plan.layout import Roles

#: Called after each step of a reference with the step's index and the packet's tensors.
AfterReferenceStep = Callable[[int, Tensors], None]


class Reference(Protocol):
    """diffusers' own pipeline of a family, unmodified, with all components on one device."""

    audio: Audio | None
    """Of the last clip; None: the model makes no sound."""

    def run(
        self,
        request: ClipRequest,
        image: Image.Image | None,
        sampling: SamplingConfig,
        *,
        before_steps: Callable[[], None],
        after_step: AfterReferenceStep,
    ) -> tuple[torch.Tensor, Frames]:
        """Makes one clip by `__call__`; returns its final latent and its frames.

        Args:
            request: gives seed and prompts.
            image: fitted to the frame's size; None for a clip without a photograph.
            sampling: resolved.
            before_steps: called before the first step.
            after_step: called after each step, with the latent and the solver's history.
        """
        ...


class Family(Protocol):
    """The functions in the module `family` of each family's package."""

    def load_model(
        self,
        checkpoint: Checkpoint,
        model: ModelConfig,
        sampling: SamplingConfig,
        device: str,
        roles: Roles,
    ) -> VideoModel:
        """Loads only the components that a rank with these roles uses.

        Raises:
            ModelError: the weights do not fit the checkpoint's configs.
            OutOfMemoryError: the device has too little memory.
        """
        ...

    def load_reference(self, checkpoint: Checkpoint, model: ModelConfig, device: str) -> Reference:
        """Loads the whole pipeline, as a user of diffusers does."""
        ...

    def check_weights(self, checkpoint: Checkpoint) -> int:
        """Compares the name and shape of every weight with the model's classes.

        Reads no weight; returns the number of tensors.

        Raises:
            ModelError: a weight is missing or unknown, or has a wrong shape or dtype.
        """
        ...

    def conditions(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What this family's bits depend on besides the request and the device."""
        ...


def family_of(checkpoint: Checkpoint) -> Family:
    """The family's functions; imports diffusers, which takes seconds."""
    return cast(Family, importlib.import_module(f"{package_of(checkpoint.family)}.family"))
