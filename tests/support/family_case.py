"""A case of the tests of families: a tiny checkpoint and a clip of it."""

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
    """Sampling parameters of a case."""
    return {"height": height, "width": width, "num_frames": num_frames, **more}


@dataclass(frozen=True)
class Case:
    """A tiny checkpoint and a clip of it."""

    family: str
    sampling: dict[str, Any]
    image: bool = False
    last_image: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    negative: str | None = None
    is_stateless: bool = False
    """Whether its schedulers keep nothing from step to step."""
    draws: bool = False
    """Whether it draws noise while it steps; the others draw all of it before."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Parts of a packet that nothing reads, and why they travel."""
    refused: Sequence[tuple[dict[str, Any], str]] = ()
    """Changes of the sampling parameters that the family cannot run, and words of the error."""

    @property
    def dtype(self) -> str:
        return "bf16" if "dtype" in self.changes else "fp32"

    def config(self, **changes: Any) -> SamplingConfig:
        kind: Any = SAMPLING_CLASSES[self.family]
        values = {**SIZES, **self.sampling}
        if self.family == "svd":
            values.pop("max_sequence_length")
        else:
            values |= {"from_image": self.image, "has_last_image": self.last_image}
        config: SamplingConfig = kind(**{**values, **changes})
        return config
