"""Owns the parameters of diffusers' sampler: their defaults and limits."""

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

#: The demo model's defaults where they differ from diffusers' (svdpp/assets/demo-model/README.md).
DEMO_SAMPLING: Mapping[str, Any] = {
    "height": 128,
    "width": 128,
    "num_frames": 14,
    "motion_bucket_id": 40,
    "max_guidance_scale": 1.1,
    "noise_aug_strength": 0.02,
}

# A latent has an eighth of the frame's height and width.
_SIDE_UNIT = 8


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The parameters of diffusers' `StableVideoDiffusionPipeline.__call__`, with its defaults.

    None for `num_frames` or `decode_chunk_size` is replaced as in diffusers when the model is
    known: by the frame count of the UNet's config, and by all frames at once.

    Raises:
        RequestError: a value out of range, or a combination that diffusers cannot run.
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
            "use fewer --frames, or a smaller --height and --width",
        )

    def _check_guidance(self) -> None:
        low, high = self.min_guidance_scale, self.max_guidance_scale
        check_number("--min-guidance-scale", low, MAX_GUIDANCE_SCALE)
        check_number("--max-guidance-scale", high, MAX_GUIDANCE_SCALE)
        # diffusers decides about guidance twice: by the maximum when it encodes, and by the larger
        # of both when it denoises. If the two differ, its __call__ fails with a shape error.
        require(
            high > 1 or low <= 1,
            f"--min-guidance-scale {low} is above 1 but --max-guidance-scale {high} is not: "
            "diffusers cannot run that",
        )
        require(
            not (self.num_frames == 1 and high > 1 >= low),
            "a clip of one frame uses only --min-guidance-scale, which is 1 or less, but "
            "--max-guidance-scale is above 1: diffusers cannot run that",
            "use --max-guidance-scale 1 to run without guidance",
        )

    @property
    def guided(self) -> bool:
        """Whether classifier-free guidance does two forward passes for each step."""
        return self.max_guidance_scale > 1

    @property
    def frames(self) -> int:
        """The frame count.

        Raises:
            ValueError: `num_frames` is still None.
        """
        if self.num_frames is None:
            raise ValueError("num_frames is None: resolve it with the model first")
        return self.num_frames

    def resolved(self, *, model_frames: int) -> SamplingConfig:
        """A copy with numbers for `num_frames` and `decode_chunk_size`, as diffusers sets them."""
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
    """The defaults of `model_name` that differ from diffusers'; empty except for the demo model."""
    return DEMO_SAMPLING if model_name == DEMO_MODEL else {}
