"""Sampling parameters that families share, with ranges and checks.

Each family defines a subclass with its own parameters, in a module of `config.families`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, Literal, Self, get_args

from svdpp.config.limits import (
    MAX_CLIP_PIXELS,
    MAX_FRAMES,
    MAX_REFERENCES,
    MAX_SIDE,
    MAX_STEPS,
    check_choice,
    check_int,
    detail_value,
    is_number,
    require,
    shown,
)
from svdpp.errors import RequestError

Fit = Literal["crop", "pad", "stretch"]

DEFAULT_NUM_STEPS = 28


@dataclass(frozen=True, kw_only=True)
class Param:
    """Numeric sampling parameter: range, type, names and help text.

    Checks, options of the command line and fields of HTTP requests are derived from a `Param`.
    `params_of` sets `name` and `default`.
    """

    highest: float
    help: str
    lowest: float = 0
    kind: type[int] | type[float] = float
    api: str = ""
    """Name of the parameter in HTTP requests and benchmarks; empty: the same as `name`."""
    excludes_lowest: bool = False
    """Whether values must be above `lowest`; False: they may also equal `lowest`."""
    shown_default: str = ""
    """Description of the default for the help text; empty: the help shows the value of
    `default`."""
    name: str = ""
    default: Any = None
    """Default value in the family; None: the default depends on the model's config or on another
    parameter."""

    @property
    def option(self) -> str:
        """Command-line option of a sampling parameter, such as `--steps` or `--param strength`."""
        is_shared = self.name in SHARED
        return f"--{self.field.replace('_', '-')}" if is_shared else f"--param {self.name}"

    @property
    def field(self) -> str:
        """Name of a sampling parameter in HTTP requests and benchmarks."""
        return self.api or self.name

    def check(self, value: Any) -> None:
        """Raise a `RequestError` unless a sampling parameter's value has its type and is in range.

        Args:
            value: Value of any type; None is allowed if the default is None.

        Raises:
            RequestError: The value has another type, or is out of range.
        """
        if value is None and self.default is None:
            return
        if self.kind is int:
            check_int(self.name, value, int(self.lowest), int(self.highest))
            return
        if not (is_number(value) and self.lowest <= value <= self.highest):
            must = f"a finite number, {self.lowest:g} to {self.highest:g}"
            raise RequestError(
                f"`{self.name}` must be {must}, got {shown(value)}",
                details={
                    "field": self.name,
                    "value": detail_value(value),
                    "lowest": self.lowest,
                    "highest": self.highest,
                },
            )
        require(
            not (self.excludes_lowest and value <= self.lowest),
            f"`{self.name}` must be above {self.lowest:g}, got {value}",
            field=self.name,
            value=value,
            above=self.lowest,
        )


#: Largest scale of classifier-free guidance; usual scales are 1 to 10.
MAX_GUIDANCE = 100.0


#: Sampling parameters with their own command-line option, such as `--steps`, by field name. Users
#: set all other parameters by `--param`.
SHARED: Mapping[str, Param] = {
    "num_inference_steps": Param(
        lowest=1, highest=MAX_STEPS, kind=int, help="Denoising steps of each clip.", api="steps"
    ),
    "height": Param(lowest=8, highest=MAX_SIDE, kind=int, help="Frame height, a multiple of 8."),
    "width": Param(lowest=8, highest=MAX_SIDE, kind=int, help="Frame width, a multiple of 8."),
    "num_frames": Param(
        lowest=1, highest=MAX_FRAMES, kind=int, help="Frames of each clip.", api="frames"
    ),
    "fps": Param(lowest=1, highest=240, help="Frames a second, such as 29.97."),
    "decode_chunk_size": Param(
        lowest=1,
        highest=MAX_FRAMES,
        kind=int,
        help="Frames decoded at once; changes the bits.",
    ),
    "guidance_scale": Param(highest=MAX_GUIDANCE, help="Guidance by the prompt; off if 1 or less."),
    "max_sequence_length": Param(
        lowest=1,
        highest=4096,
        kind=int,
        help="Tokens of a prompt that the model reads; the rest is cut off.",
        api="max_prompt_tokens",
    ),
    "motion_bucket_id": Param(highest=1023, kind=int, help="Amount of motion, 0 to 1023."),
    "noise_aug_strength": Param(highest=10.0, help="Noise added to the image."),
    "min_guidance_scale": Param(highest=MAX_GUIDANCE, help="Guidance of the first frame."),
    "max_guidance_scale": Param(
        highest=MAX_GUIDANCE,
        help="Guidance of the last frame; 1 or less turns guidance off.",
    ),
}

#: Parameter `video_frames` of families whose clips continue a video: the number of frames that are
#: read from the video, while `num_frames` is the number of frames of the clip.
VIDEO_FRAMES = Param(
    lowest=1,
    highest=MAX_FRAMES,
    kind=int,
    help="Frames to read from the start of the video; the clip continues them.",
)


def as_whole(number: float) -> float:
    """Return a number as an int if it is whole, so that JSON shows `8` and not `8.0`."""
    return int(number) if float(number).is_integer() else number


@cache
def params_of(kind: Any) -> dict[str, Param]:
    """Return the numeric parameters of a sampling class, by field name."""
    known = {**SHARED, **kind.own}
    params = {}
    for field in fields(kind):
        if field.name in known:
            default = None if field.default is MISSING else field.default
            params[field.name] = replace(known[field.name], name=field.name, default=default)
    return params


#: Parameters that are not fields of HTTP requests. Requests set height and width by `size`, and
#: cannot set `decode_chunk_size`, because a server decodes all clips with the same value.
_NOT_IN_REQUESTS = ("height", "width", "decode_chunk_size")


def params_by_field(kind: Any) -> dict[str, Param]:
    """Return the numeric parameters of a sampling class, by their field names in HTTP requests."""
    params = params_of(kind)
    return {param.field: param for name, param in params.items() if name not in _NOT_IN_REQUESTS}


def frames_of_seconds(seconds: float, fps: float, kind: type[CommonSampling]) -> int:
    """Return the allowed number of frames whose duration is closest to `seconds`.

    Args:
        seconds: Duration of the clip.
        fps: Frames per second.
        kind: Class of the sampling parameters, which says which numbers of frames are allowed.
    """
    unit, remainder = kind.frames_unit, kind.frames_remainder
    return max(remainder, round((seconds * fps - remainder) / unit) * unit + remainder)


def extra_params(kind: Any) -> dict[str, Param]:
    """Return the parameters of a sampling class beyond those of `PromptedSampling`, by name."""
    others = params_of(PromptedSampling)
    return {name: param for name, param in params_of(kind).items() if name not in others}


@dataclass(frozen=True, kw_only=True)
class CommonSampling:
    """Sampling parameters that all families have; each family has a subclass."""

    #: Divisor of height and width, in pixels.
    side_unit: ClassVar[int] = 8
    #: The number of frames must be `frames_remainder` plus a multiple of `frames_unit`. With 1 and
    #: 4, it is 1, 5, 9 and so on.
    frames_unit: ClassVar[int] = 1
    frames_remainder: ClassVar[int] = 1
    #: Axes of the latent, one letter each: B (batch), F (frames), C (channels), H, W, and N for all
    #: positions of all frames.
    latent_axes: ClassVar[str] = "BCFHW"
    #: Whether the family's pipeline crops an image whose aspect ratio differs from the clip's;
    #: other pipelines stretch such an image.
    crops_image: ClassVar[bool] = False
    #: Whether the pipeline keeps the aspect ratio of input images, because they are references and
    #: not frames of the clip; False: the pipeline crops or stretches them (see `crops_image`).
    keeps_image_shape: ClassVar[bool] = False
    #: Largest ratio of an image's longer side to its shorter side; None: only the limit for all
    #: image files applies.
    max_image_aspect: ClassVar[int | None] = None
    #: Whether clips start from the frames of a video instead of an image.
    from_video: ClassVar[bool] = False
    #: Further videos that each clip takes. A key is an argument of the pipeline's `__call__`, such
    #: as `face_video`. A value such as 512 means that the video's frames are resized to squares of
    #: 512 pixels; None means that they are resized to the clip's size.
    videos: ClassVar[Mapping[str, int | None]] = {}
    #: Whether only the default of `num_inference_steps` is possible.
    has_fixed_steps: ClassVar[bool] = False
    #: Numeric parameters that only the family of this class has, by name.
    own: ClassVar[Mapping[str, Param]] = {}

    family: str
    num_inference_steps: int
    height: int
    width: int
    num_frames: int | None = None
    """Number of frames; None: the number in the model's config."""
    fps: float
    """Frames per second. A whole number is stored as an int, as in the JSON of clips."""
    decode_chunk_size: int | None = None
    """Number of frames to decode at once; None: all frames."""
    fit: Fit = "stretch"
    """Method of fitting an input image whose aspect ratio differs from the clip's."""

    @property
    def step_axes(self) -> str:
        """Axes of the latent after a step; `latent_axes` are those of the latent before step 0."""
        return self.latent_axes

    def __post_init__(self) -> None:
        kind: Any = type(self)
        check_sides(self, (self.side_unit, self.side_unit))
        for name, param in params_of(kind).items():
            value = getattr(self, name)
            param.check(value)
            if param.kind is float and value is not None:
                # ints become floats, because 3 and 3.0 would give a clip different hashes
                object.__setattr__(self, name, float(value))
        object.__setattr__(self, "fps", as_whole(self.fps))
        check_choice("fit", self.fit, get_args(Fit))
        self._check_frames()
        frames = self.num_frames or 1
        num_pixels = self.height * self.width * frames
        too_many = f"{frames} frames of {self.height} x {self.width} are {num_pixels} pixels"
        require(
            num_pixels <= MAX_CLIP_PIXELS,
            f"{too_many}, more than {MAX_CLIP_PIXELS}",
            field="num_frames",
            frames=frames,
            height=self.height,
            width=self.width,
            pixels=num_pixels,
            highest_pixels=MAX_CLIP_PIXELS,
        )

    def _check_frames(self) -> None:
        unit, remainder = self.frames_unit, self.frames_remainder
        frames = remainder if self.num_frames is None else self.num_frames
        # diffusers would round another number of frames, so that the clip would not have the
        # requested length.
        below = max(0, frames - remainder) // unit * unit + remainder
        require(
            frames == below,
            f"`num_frames` must be a multiple of {unit} plus {remainder}, got {frames}",
            f"use `num_frames` {below} or `num_frames` {below + unit}",
            frames=frames,
            unit=unit,
            remainder=remainder,
            nearest=[below, below + unit],
        )

    @property
    def frames(self) -> int:
        """Number of frames of the clip, which is known once the configuration is resolved.

        Raises:
            ValueError: `num_frames` is None, because the model's default has not been read yet.
        """
        if self.num_frames is None:
            raise ValueError("num_frames is None: call with_model_defaults first")
        return self.num_frames

    @property
    def video_frames(self) -> int | None:
        """Number of frames read from the input video; None: clips do not start from a video."""
        return self.frames if self.from_video else None

    @property
    def steps_unit(self) -> int:
        """Number that must divide `num_inference_steps`, such as the number of a clip's chunks."""
        return 1

    def with_few_steps(self, lowest: int, num_ranks: int) -> Self:
        """Return a copy of the sampling parameters with few steps, for a trial or a measurement.

        Args:
            lowest: Smallest number of steps of the copy. The family may need more, or may have a
                fixed number of steps, which the copy keeps.
            num_ranks: Number of ranks. The copy's number of steps is a multiple of `num_ranks`,
                unless the family has a fixed number of steps.
        """
        if self.has_fixed_steps:
            return self
        unit = math.lcm(self.steps_unit, num_ranks)
        return replace(self, num_inference_steps=math.ceil(lowest / unit) * unit)

    def check_videos(self, names: Collection[str]) -> None:
        """Raise a `RequestError` unless a clip has all further videos of its family, and no others.

        Args:
            names: Names of the clip's further videos, such as `face_video`. The clip's input is not
                one of them.

        Raises:
            RequestError: A video is missing, or the family takes no video of this name.
        """
        taken = f"it takes {' and '.join(self.videos)}" if self.videos else ""
        for name in sorted({*names} - {*self.videos}):
            raise RequestError(
                f"the family {self.family} takes no video {name!r}",
                taken,
                details={"family": self.family, "video": name, "known": list(self.videos)},
            )
        for name in self.videos:
            wrong = f"the family {self.family} needs the video {name}"
            require(name in names, wrong, f"give `video` {name}=FILE")

    def with_model_defaults(self, *, model_frames: int) -> Self:
        """Return a copy of the sampling parameters with diffusers' values in place of None.

        `num_frames` becomes `model_frames`. A subclass may also replace other values of None.

        Args:
            model_frames: Number of frames in the model's config.
        """
        return replace(self, num_frames=self.num_frames or model_frames)


@dataclass(frozen=True, kw_only=True)
class PromptedSampling(CommonSampling):
    """Sampling parameters that all families with prompts have."""

    #: Whether the denoiser gets `guidance_scale` as an input. Guidance then needs no second forward
    #: pass.
    embedded_guidance: ClassVar[bool] = False

    num_inference_steps: int = 50
    num_frames: int
    guidance_scale: float
    max_sequence_length: int
    from_image: bool = False
    """Whether clips start from an image; False: they are made from text alone."""
    has_last_image: bool = False
    """Whether clips have an image for the last frame, besides the image for the first frame."""
    num_references: int = 0
    """Number of references of each clip: further images of what the clip shows, besides its input
    image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("num_references", self.num_references, 0, MAX_REFERENCES)
        wrong = "`references` need an image, too, which is the first reference"
        hint = "give one of the references as the image"
        require(self.from_image or not self.num_references, wrong, hint)
        if self.has_last_image:
            require(self.from_image, "`last_image` needs a first image, too", "give both images")
            too_few = f"`last_image` needs at least 2 `num_frames`, got {self.num_frames}"
            require(self.num_frames > 1, too_few, frames=self.num_frames, lowest=2)
        wrong = (
            "`decode_chunk_size` is for Stable Video Diffusion; "
            f"the family {self.family} decodes all frames at once"
        )
        require(self.decode_chunk_size is None, wrong)

    @property
    def uses_guidance(self) -> bool:
        """Whether classifier-free guidance is on, which doubles the forward passes of each step."""
        return self.guidance_scale > 1 and not self.embedded_guidance


def check_sides(sampling: CommonSampling, units: tuple[int, int]) -> None:
    """Raise a `RequestError` unless a clip's height and width are in range and multiples of a unit.

    Args:
        sampling: Sampling parameters with height and width.
        units: Two numbers of pixels; the height must be a multiple of the first number, and the
            width must be a multiple of the second number.

    Raises:
        RequestError: Height or width is not a multiple of its unit, or is above `MAX_SIDE`.
    """
    for name, unit in zip(("height", "width"), units, strict=True):
        side = getattr(sampling, name)
        if isinstance(side, int) and not (0 < side <= MAX_SIDE and side % unit == 0):
            must = f"a multiple of {unit} from {unit} to {MAX_SIDE}"
            raise RequestError(
                f"`{name}` must be {must}, got {shown(side)}",
                details={
                    "field": name,
                    "value": detail_value(side),
                    "unit": unit,
                    "lowest": unit,
                    "highest": MAX_SIDE,
                },
            )
