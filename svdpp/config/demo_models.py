"""Small demo models that are included in svdpp, to try it on a CPU without a download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "white", "black")


@dataclass(frozen=True, kw_only=True)
class DemoModel:
    """Small trained checkpoint that is included in `svdpp/assets`.

    The README in the checkpoint's folder states the checkpoint's origin and limits. A demo model
    shows how svdpp works; it is not a small version of a real model.
    """

    folder: str
    """Name of the model's folder in `svdpp/assets`."""
    title: str
    """Short description of the clips that the model makes."""
    license: str
    """License of the weights, as an SPDX identifier."""
    sampling: Mapping[str, Any]
    """Defaults of sampling parameters, where they differ from diffusers' defaults."""
    prompt: str | None = None
    """Example of a prompt that the model understands; None: the model takes no prompt."""
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Words that the model understands in prompts, by topic, such as `colours`; empty: the model
    takes no prompt."""


#: All demo models, by the names that `--model` takes.
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
