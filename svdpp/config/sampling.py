"""Sampling parameters that families share, with their ranges and checks.

Each family has its own class, in its module of `config.families`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, Literal, Self, get_args

from svdpp.config.limits import (
    MAX_CLIP_PIXELS,
    MAX_FRAMES,
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
    """Numeric sampling parameter, from which checks, options, fields of requests and help follow.

    `params_of` fills in `name` and `default`.
    """

    highest: float
    help: str
    lowest: float = 0
    kind: type[int] | type[float] = float
    api: str = ""
    """Name in HTTP requests and benchmarks; empty: `name`."""
    excludes_lowest: bool = False
    """Whether the value must be above `lowest`."""
    shown_default: str = ""
    """Default, in words, for the help; empty: the value itself."""
    name: str = ""
    default: Any = None
    """Default of the family; None: that of the model, or of another parameter."""

    @property
    def option(self) -> str:
        """Option as users type it."""
        is_shared = self.name in SHARED
        return f"--{self.field.replace('_', '-')}" if is_shared else f"--param {self.name}"

    @property
    def field(self) -> str:
        """Name in HTTP requests and benchmarks."""
        return self.api or self.name

    def check(self, value: Any) -> None:
        """Check a value of this parameter.

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
        lowest = 0 if self.excludes_lowest else self.lowest
        if not (is_number(value) and lowest <= value <= self.highest):
            must = f"a finite number, {lowest:g} to {self.highest:g}"
            raise RequestError(
                f"`{self.name}` must be {must}, got {shown(value)}",
                details={
                    "field": self.name,
                    "value": detail_value(value),
                    "lowest": lowest,
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


#: Largest scale of classifier-free guidance; usual are 1 to 10.
MAX_GUIDANCE = 100.0


#: Parameters that have their own option, by the name of their field.
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
        help="Frames decoded at once; bits depend on it.",
    ),
    "guidance_scale": Param(
        highest=MAX_GUIDANCE, help="Guidance by the prompt; up to 1 it is off."
    ),
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


def as_whole(number: float) -> float:
    """Return a number as an int if it is whole, so that JSON shows it without a fraction."""
    return int(number) if float(number).is_integer() else number


@cache
def params_of(kind: Any) -> dict[str, Param]:
    """Return the parameters of a sampling class, by the names of the fields."""
    known = {**SHARED, **kind.own}
    params = {}
    for field in fields(kind):
        if field.name in known:
            default = None if field.default is MISSING else field.default
            params[field.name] = replace(known[field.name], name=field.name, default=default)
    return params


#: Parameters that requests of clips name in another way, or not at all.
_NOT_IN_REQUESTS = ("height", "width", "decode_chunk_size")


def params_by_field(kind: Any) -> dict[str, Param]:
    """Return the parameters of a sampling class by their names in requests of clips."""
    params = params_of(kind)
    return {param.field: param for name, param in params.items() if name not in _NOT_IN_REQUESTS}


def frames_of_seconds(seconds: float, fps: float, unit: int) -> int:
    """Return the number of frames that comes nearest to a duration.

    Args:
        seconds: Duration of the clip.
        fps: Frames per second.
        unit: The number of frames is a multiple of this number plus 1.
    """
    return max(1, round((seconds * fps - 1) / unit) * unit + 1)


def extra_params(kind: Any) -> dict[str, Param]:
    """Return the parameters that only the family has, by name."""
    others = params_of(PromptedSampling)
    return {name: param for name, param in params_of(kind).items() if name not in others}


@dataclass(frozen=True, kw_only=True)
class CommonSampling:
    """Sampling parameters of all families; each family has its subclass."""

    #: Number of pixels of which height and width are multiples.
    side_unit: ClassVar[int] = 8
    #: Number of which the number of frames is a multiple, plus 1.
    frames_unit: ClassVar[int] = 1
    #: Axes of the latent, one letter each: B, F (frames), C (channels), H, W; N: all positions.
    latent_axes: ClassVar[str] = "BCFHW"
    #: Whether clips start from the frames of a video instead of an image.
    from_video: ClassVar[bool] = False
    #: Further videos that each clip takes, by the argument of `__call__`, each with the side of its
    #: square frames in pixels; None: its frames get the clip's size.
    videos: ClassVar[Mapping[str, int | None]] = {}
    #: Parameters that only the family has, by name.
    own: ClassVar[Mapping[str, Param]] = {}

    family: str
    num_inference_steps: int
    height: int
    width: int
    num_frames: int | None = None
    """Number of frames; None: that in the model's config."""
    fps: float
    """Frames per second; an int if it is whole, as in the JSON of clips."""
    decode_chunk_size: int | None = None
    """Number of frames to decode at once; None: all."""
    fit: Fit = "stretch"
    """Method by which an image of another shape is fitted to the frame."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        check_sides(self, (self.side_unit, self.side_unit))
        for name, param in params_of(kind).items():
            value = getattr(self, name)
            param.check(value)
            if param.kind is float and value is not None:
                object.__setattr__(self, name, float(value))  # an int would give another hash
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
        unit, frames = self.frames_unit, self.num_frames or 1
        below = (frames - 1) // unit * unit + 1  # diffusers would round other numbers
        require(
            frames == below,
            f"`num_frames` must be a multiple of {unit} plus 1, got {frames}",
            f"nearest: `num_frames` {below} or `num_frames` {below + unit}",
            frames=frames,
            unit=unit,
            remainder=1,
            nearest=[below, below + unit],
        )

    @property
    def frames(self) -> int:
        """Number of frames of a resolved configuration.

        Raises:
            ValueError: The number is not known yet.
        """
        if self.num_frames is None:
            raise ValueError("num_frames is None: resolve it with the model first")
        return self.num_frames

    @property
    def video_frames(self) -> int | None:
        """Number of frames that a clip takes from a video; None: it does not start from a video."""
        return self.frames if self.from_video else None

    def check_videos(self, names: Collection[str]) -> None:
        """Check that a clip has exactly the further videos that the family takes.

        Args:
            names: Names of the clip's further videos.

        Raises:
            RequestError: A video is missing, or the family takes none of its name.
        """
        taken = ", ".join(self.videos)
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
        """Return a copy with numbers instead of None, which are those that diffusers would use.

        Args:
            model_frames: Number of frames in the model's config.
        """
        return replace(self, num_frames=self.num_frames or model_frames)


@dataclass(frozen=True, kw_only=True)
class PromptedSampling(CommonSampling):
    """Sampling parameters of families with prompts; a family may have more."""

    #: Whether `guidance_scale` is an input of the denoiser, which then runs only once in each step.
    embedded_guidance: ClassVar[bool] = False

    num_inference_steps: int = 50
    num_frames: int
    guidance_scale: float
    max_sequence_length: int
    from_image: bool = False
    """Whether clips start from an image; False: they are made from text alone."""
    has_last_image: bool = False
    """Whether clips from an image also end at one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.has_last_image:
            require(self.from_image, "`last_image` needs a first image, too", "give both")
            too_few = f"`last_image` needs at least 2 `num_frames`, got {self.num_frames}"
            require(self.num_frames > 1, too_few, frames=self.num_frames, lowest=2)
        wrong = (
            "`decode_chunk_size` is for Stable Video Diffusion; others decode all frames at once"
        )
        require(self.decode_chunk_size is None, wrong)

    @property
    def uses_guidance(self) -> bool:
        """Whether each step has two forward passes, by the scale of the first expert."""
        return self.guidance_scale > 1 and not self.embedded_guidance


def check_sides(sampling: CommonSampling, units: tuple[int, int]) -> None:
    """Check height and width.

    Args:
        sampling: Sampling parameters with height and width.
        units: Numbers of pixels of which height and width must be multiples.

    Raises:
        RequestError: A side is not a multiple of its unit, or above `MAX_SIDE`.
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
