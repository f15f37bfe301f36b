"""Owns the knobs of diffusers' sampler: its defaults, the demo model's, and what may be asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from svdpp.config.limits import (
    MAX_CLIP_PIXELS,
    MAX_FPS,
    MAX_FRAMES,
    MAX_GUIDANCE_SCALE,
    MAX_MOTION_BUCKET_ID,
    MAX_NOISE_AUG_STRENGTH,
    MAX_SIDE,
    MAX_STEPS,
    check_number,
    check_whole,
    require,
    shown,
)
from svdpp.config.model import DEMO_MODEL

Fit = Literal["crop", "pad", "stretch"]

DEFAULT_NUM_STEPS = 28

#: What differs from diffusers' defaults for the built-in model: the settings that its README
#: (svdpp/assets/demo-model/README.md) recommends.
DEMO_SAMPLING: Mapping[str, Any] = {
    "height": 128,
    "width": 128,
    "num_frames": 14,
    "motion_bucket_id": 40,
    "max_guidance_scale": 1.1,
    "noise_aug_strength": 0.02,
}

# Latents have an eighth of the frame's height and width.
_SIDE_UNIT = 8


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The knobs of diffusers' `StableVideoDiffusionPipeline.__call__`, with its defaults.

    `num_frames` and `decode_chunk_size` are None until the model is known: then they become the
    UNet's own frame count, and all frames at once, as in diffusers.

    Raises:
        RequestError: a value beyond the limits, or a combination that diffusers cannot run.
    """

    num_inference_steps: int = DEFAULT_NUM_STEPS
    height: int = 576
    width: int = 1024
    num_frames: int | None = None
    fps: int = 7
    motion_bucket_id: int = 127
    noise_aug_strength: float = 0.02
    min_guidance_scale: float = 1.0
    max_guidance_scale: float = 3.0
    decode_chunk_size: int | None = None
    fit: Fit = "stretch"

    def __post_init__(self) -> None:
        check_whole("--steps", self.num_inference_steps, 1, MAX_STEPS)
        self._check_size()
        check_whole("--fps", self.fps, 1, MAX_FPS, " frames a second")
        check_whole("--motion-bucket-id", self.motion_bucket_id, 0, MAX_MOTION_BUCKET_ID)
        check_number("--noise-aug-strength", self.noise_aug_strength, MAX_NOISE_AUG_STRENGTH)
        self._check_guidance()
        require(
            self.fit in get_args(Fit),
            f"--fit must be crop, pad or stretch, got {shown(self.fit)}",
        )

    def _check_size(self) -> None:
        for name in ("height", "width"):
            _check_side(name, getattr(self, name))
        for option, value in (
            ("--frames", self.num_frames),
            ("--decode-chunk-size", self.decode_chunk_size),
        ):
            if value is not None:
                check_whole(option, value, 1, MAX_FRAMES)
        num_pixels = self.height * self.width * (self.num_frames or 1)
        require(
            num_pixels <= MAX_CLIP_PIXELS,
            f"{self.num_frames or 1} frames of {self.height} x {self.width} are {num_pixels} "
            f"pixels, more than {MAX_CLIP_PIXELS}",
            "fewer --frames, or a smaller --height and --width",
        )

    def _check_guidance(self) -> None:
        low, high = self.min_guidance_scale, self.max_guidance_scale
        check_number("--min-guidance-scale", low, MAX_GUIDANCE_SCALE)
        check_number("--max-guidance-scale", high, MAX_GUIDANCE_SCALE)
        # diffusers decides about guidance twice: by the maximum when it encodes, by the larger of
        # both when it denoises. If the two answers differ, its own __call__ fails on shapes.
        require(
            high > 1 or low <= 1,
            f"--min-guidance-scale {low} is above 1 but --max-guidance-scale {high} is not: "
            "diffusers cannot run that",
        )
        require(
            not (self.num_frames == 1 and high > 1 >= low),
            "one frame takes the minimum guidance alone, which is 1 or less while the maximum is "
            "above: diffusers cannot run that",
            "--max-guidance-scale 1 switches guidance off",
        )

    @property
    def guided(self) -> bool:
        """Whether classifier-free guidance makes two forward passes."""
        return self.max_guidance_scale > 1

    @property
    def frames(self) -> int:
        """The frame count, once it is known.

        Raises:
            ValueError: `num_frames` has not been resolved against a model (a programmer's error).
        """
        if self.num_frames is None:
            raise ValueError("num_frames is resolved by the model first")
        return self.num_frames

    def resolved(self, *, model_frames: int) -> SamplingConfig:
        """A copy in which frame count and decode chunk are numbers, as diffusers chooses them."""
        frames = self.num_frames or model_frames
        return replace(self, num_frames=frames, decode_chunk_size=self.decode_chunk_size or frames)


def _check_side(name: str, value: Any) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    require(
        is_whole and 0 < value <= MAX_SIDE and value % _SIDE_UNIT == 0,
        f"--{name} must be a multiple of {_SIDE_UNIT} from {_SIDE_UNIT} to {MAX_SIDE}, "
        f"got {shown(value)}",
        _nearest_side(name, value) if is_whole else "",
    )


def _nearest_side(name: str, value: int) -> str:
    down, up = value // _SIDE_UNIT * _SIDE_UNIT, -(-value // _SIDE_UNIT) * _SIDE_UNIT
    below, above = (min(max(side, _SIDE_UNIT), MAX_SIDE) for side in (down, up))
    nearest = f"{below}" if below == above else f"{below} or {above}"
    return f"nearest: --{name} {nearest}"


def sampling_defaults(model_name: str) -> Mapping[str, Any]:
    """What `model_name` changes in diffusers' defaults; empty for every model but the demo's."""
    return DEMO_SAMPLING if model_name == DEMO_MODEL else {}
