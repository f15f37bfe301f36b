"""Test case of a model family: options of a tiny checkpoint, and of a clip made with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from svdpp.config import SAMPLING_CLASSES, SamplingConfig

STEPS = 3
SIZES: dict[str, Any] = {"num_inference_steps": STEPS, "max_sequence_length": 8}
BF16 = {"dtype": torch.bfloat16}
UNGUIDED = {"guidance_scale": 1.0}


def size(height: int, width: int, num_frames: int, **more: Any) -> dict[str, Any]:
    """Return the sampling parameters for a frame size and a number of frames."""
    return {"height": height, "width": width, "num_frames": num_frames, **more}


@dataclass(frozen=True)
class Case:
    """Test case of a model family: options of a tiny checkpoint, and of a clip made with it."""

    family: str
    sampling: dict[str, Any]
    image: bool = False
    last_image: bool = False
    num_references: int = 0
    changes: dict[str, Any] = field(default_factory=dict)
    negative: str | None = None
    is_stateless: bool = False
    """Whether no scheduler keeps state from one step to the next."""
    draws: bool = False
    """Whether the pipeline draws noise during the denoising steps. Otherwise all noise is drawn
    before the first step."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors in a packet that no later step reads, each with the reason why the tensor is
    sent."""
    refused: Sequence[tuple[dict[str, Any], str]] = ()
    """Changes of sampling parameters that the family must refuse, each with words of the expected
    error.
    """

    @property
    def dtype(self) -> str:
        return "bf16" if "dtype" in self.changes else "fp32"

    @property
    def values(self) -> dict[str, Any]:
        """Sampling parameters of the clip that the user chooses, by the names of their fields."""
        values = {**SIZES, **self.sampling}
        if self.family == "svd":
            values.pop("max_sequence_length")
        return values

    def config(self, **changes: Any) -> SamplingConfig:
        kind: Any = SAMPLING_CLASSES[self.family]
        values = self.values
        if self.family != "svd":
            values |= {"from_image": self.image, "has_last_image": self.last_image}
            values["num_references"] = self.num_references
        config: SamplingConfig = kind(**{**values, **changes})
        return config
