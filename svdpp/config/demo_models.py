"""Models that come with svdpp for trying it on a CPU, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "white", "black")


@dataclass(frozen=True, kw_only=True)
class DemoModel:
    """A small trained checkpoint in `svdpp/assets`, whose README tells its origin and its limits.

    A demo is a toy that shows how svdpp works, not a small version of a real model.
    """

    folder: str
    """Name of its folder in `svdpp/assets`."""
    title: str
    """Clips that it makes, in a few words."""
    license: str
    """License of its weights, as an SPDX identifier."""
    sampling: Mapping[str, Any]
    """Defaults of its sampling parameters where they differ from diffusers'."""
    prompt: str | None = None
    """Prompt that it can follow; None: it takes no prompt."""
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Words of prompts that it knows, by what they say; empty: it takes no prompt."""


#: The demos by the names that `--model` takes.
DEMO_MODELS: Mapping[str, DemoModel] = {
    "demo": DemoModel(
        folder="demo-model",
        title="a blurred toy that drifts over an image",
        license="Apache-2.0",
        sampling={
            "height": 128,
            "width": 128,
            "num_frames": 14,
            "motion_bucket_id": 40,
            "max_guidance_scale": 1.1,
            "noise_aug_strength": 0.02,
        },
    ),
    "demo-text": DemoModel(
        folder="demo-text",
        title="a toy that moves one coloured shape as a prompt says",
        license="CC0-1.0",
        sampling={
            "height": 64,
            "width": 64,
            "num_frames": 16,
            "num_inference_steps": 24,
            "guidance_scale": 3.0,
        },
        prompt="a red circle moves right on a blue background",
        words={
            "colours": _COLOURS,
            "shapes": ("circle", "ball", "square", "box", "triangle", "star"),
            "motions": (
                *("moves left", "moves right", "moves up", "rises", "moves down", "falls"),
                *("bounces", "grows", "shrinks", "spins", "stands still"),
            ),
            "backgrounds": (*_COLOURS, "gray"),
        },
    ),
}
