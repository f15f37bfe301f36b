"""The parameters of diffusers' samplers, by model family: their defaults and limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, Literal, Self, get_args

from svdpp.config.limits import (
    MAX_CLIP_PIXELS,
    MAX_FRAMES,
    MAX_SIDE,
    MAX_STEPS,
    check_whole,
    is_number,
    require,
    shown,
)
from svdpp.errors import RequestError, nearest

Fit = Literal["crop", "pad", "stretch"]

DEFAULT_NUM_STEPS = 28


@dataclass(frozen=True)
class Param:
    """A number that samplers take.

    The checks, the options of the command line, the fields of requests and benches, and
    `svdpp models` follow from it. `params_of` fills in name and default.
    """

    default: Any
    """Of its family; None: that of the model, or of another parameter."""
    highest: float
    help: str
    lowest: float = 0
    kind: type[int] | type[float] = float
    api: str = ""
    """Its name in HTTP requests and benches, if it is another one."""
    above: bool = False
    """Whether it must be above `lowest`."""
    shown_default: str = ""
    """The default in words, for the help."""
    name: str = ""

    @property
    def option(self) -> str:
        """The option as users type it."""
        return f"--{self.field.replace('_', '-')}" if self.is_shared else f"--param {self.name}"

    @property
    def is_shared(self) -> bool:
        """Whether it has an option of its own."""
        return self.name in SHARED

    @property
    def field(self) -> str:
        """Its name in HTTP requests and benches."""
        return self.api or self.name

    def check(self, value: Any) -> None:
        """Refuses a value of another type or out of range, by the option's name."""
        if value is None and self.default is None:
            return
        if self.kind is int:
            check_whole(self.option, value, int(self.lowest), int(self.highest))
            return
        require(
            is_number(value) and 0 <= value <= self.highest,
            f"{self.option} must be a finite number, 0 to {self.highest:g}, got {shown(value)}",
        )
        is_low = self.above and value <= self.lowest
        require(not is_low, f"{self.option} must be above {self.lowest:g}, got {value}")


#: Of classifier-free guidance; usual are 1 to 10.
MAX_GUIDANCE = 100.0


def _whole(lowest: int, highest: int, help: str, **more: Any) -> Param:
    return Param(None, highest, help, lowest, int, **more)


#: The parameters with an option of their own, by the name of their field.
SHARED: Mapping[str, Param] = {
    "num_inference_steps": _whole(1, MAX_STEPS, "Denoising steps of each clip.", api="steps"),
    "height": _whole(8, MAX_SIDE, "Frame height, a multiple of 8."),
    "width": _whole(8, MAX_SIDE, "Frame width, a multiple of 8."),
    "num_frames": _whole(1, MAX_FRAMES, "Frames of each clip.", api="frames"),
    "fps": _whole(1, 240, "Frames per second, 1 to 240."),
    "decode_chunk_size": _whole(
        1, MAX_FRAMES, "Frames to decode at a time; bits and memory depend on it."
    ),
    "guidance_scale": Param(
        None, MAX_GUIDANCE, "Guidance by the prompt; 1 or less turns guidance off."
    ),
    "max_sequence_length": _whole(
        1,
        4096,
        "Tokens of a prompt that the model reads; the rest is cut off.",
        api="max_prompt_tokens",
    ),
    "motion_bucket_id": _whole(0, 1023, "Amount of motion, 0 to 1023."),
    "noise_aug_strength": Param(None, 10.0, "Noise added to the image."),
    "min_guidance_scale": Param(None, MAX_GUIDANCE, "Guidance of the first frame."),
    "max_guidance_scale": Param(
        None, MAX_GUIDANCE, "Guidance of the last frame; 1 or less turns guidance off."
    ),
}


@cache
def params_of(kind: Any) -> dict[str, Param]:
    """The parameters of a sampling class, by the name of the field."""
    known = {**SHARED, **kind.own}
    return {
        each.name: replace(
            known[each.name],
            name=each.name,
            default=None if each.default is MISSING else each.default,
        )
        for each in fields(kind)
        if each.name in known
    }


def own_params(kind: Any) -> dict[str, Param]:
    """The parameters that the family alone has, by name."""
    others = params_of(PromptedSampling)
    return {name: param for name, param in params_of(kind).items() if name not in others}


@dataclass(frozen=True, kw_only=True)
class CommonSampling(ABC):
    """The parameters that the pipelines of all families take; each family has its subclass."""

    #: Height and width are multiples of this number of pixels.
    side_unit: ClassVar[int] = 8
    #: The number of frames is a multiple of this number plus 1, if it is not 1.
    frames_unit: ClassVar[int] = 1
    #: The latent's axes, one letter each: B, F (frames), C (channels), H, W; N: all positions.
    latent_axes: ClassVar[str] = "BCFHW"
    #: Whether what a clip starts from is the frames of a video.
    from_video: ClassVar[bool] = False
    #: The further videos that each clip takes, by the argument of `__call__`; the side of their
    #: square frames in pixels, or None: they get the clip's size.
    videos: ClassVar[Mapping[str, int | None]] = {}
    #: The parameters that the family alone has, by name.
    own: ClassVar[Mapping[str, Param]] = {}

    family: str
    num_inference_steps: int
    height: int
    width: int
    num_frames: int | None = None
    """None: that of the model's config."""
    fps: int
    decode_chunk_size: int | None = None
    """Frames to decode at a time; None: all."""
    fit: Fit = "stretch"
    """How an image of another shape is fitted to the frame."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        check_sides(self, (self.side_unit, self.side_unit))
        for name, param in params_of(kind).items():
            param.check(getattr(self, name))
        require(
            self.fit in get_args(Fit),
            f"--fit must be crop, pad or stretch, got {shown(self.fit)}",
        )
        check_frames(self, self.frames_unit)
        num_pixels = self.height * self.width * (self.num_frames or 1)
        require(
            num_pixels <= MAX_CLIP_PIXELS,
            f"{self.num_frames or 1} frames of {self.height} x {self.width} are {num_pixels} "
            f"pixels, more than {MAX_CLIP_PIXELS}",
            "use fewer --frames, or a smaller --height and --width",
        )

    @property
    @abstractmethod
    def guided(self) -> bool:
        """Whether classifier-free guidance does two forward passes for each step."""

    @property
    def frames(self) -> int:
        """The frame count, once the model's is known."""
        if self.num_frames is None:
            raise ValueError("num_frames is None: resolve it with the model first")
        return self.num_frames

    @property
    def video_frames(self) -> int | None:
        """Frames that a clip takes of a video; None: it starts from no video."""
        return self.frames if self.from_video else None

    def check_videos(self, names: Collection[str]) -> None:
        """Checks that a clip has the further videos that the family takes, and no others."""
        for name in sorted({*names} - {*self.videos}):
            hint = nearest(name, self.videos, "leave it out")
            raise RequestError(f"the family {self.family} takes no video {name!r}", hint)
        for name in self.videos:
            if name not in names:
                hint = f"give --video {name}=FILE"
                raise RequestError(f"the family {self.family} needs the video {name}", hint)

    def resolved(self, *, model_frames: int) -> Self:
        """A copy with numbers in place of the model's defaults, as diffusers sets them."""
        return replace(self, num_frames=self.num_frames or model_frames)


@dataclass(frozen=True, kw_only=True)
class SvdSampling(CommonSampling):
    """The parameters of diffusers' `StableVideoDiffusionPipeline.__call__`, with its defaults.

    None for `num_frames` or `decode_chunk_size` is replaced as in diffusers when the model is
    known: by the frame count of the UNet's config, and by all frames at once.
    """

    latent_axes: ClassVar[str] = "BFCHW"
    from_image: ClassVar[bool] = True

    family: Literal["svd"] = "svd"
    num_inference_steps: int = DEFAULT_NUM_STEPS
    height: int = 576
    width: int = 1024
    fps: int = 7
    motion_bucket_id: int = 127
    noise_aug_strength: float = 0.02
    min_guidance_scale: float = 1.0
    max_guidance_scale: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.min_guidance_scale, self.max_guidance_scale
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

    def resolved(self, *, model_frames: int) -> Self:
        """A copy with numbers for `num_frames` and `decode_chunk_size`, as diffusers sets them."""
        frames = self.num_frames or model_frames
        return replace(self, num_frames=frames, decode_chunk_size=self.decode_chunk_size or frames)


@dataclass(frozen=True, kw_only=True)
class PromptedSampling(CommonSampling):
    """The parameters that the families with prompts share; a family may have more of them."""

    #: Whether `guidance_scale` is an input of the model, which then runs once for each step.
    embedded_guidance: ClassVar[bool] = False

    num_inference_steps: int = 50
    num_frames: int
    guidance_scale: float
    max_sequence_length: int
    from_image: bool = False
    """Whether clips start from an image; otherwise they are made from text alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.decode_chunk_size is None,
            f"--decode-chunk-size is for Stable Video Diffusion; {self.family} decodes all frames "
            "at once",
        )

    @property
    def guided(self) -> bool:
        """See `CommonSampling`; of two experts, the scale of the first decides in diffusers."""
        return self.guidance_scale > 1 and not self.embedded_guidance


def check_sides(sampling: CommonSampling, units: tuple[int, int]) -> None:
    """Checks that height and width are multiples of `units`; the hint names the nearest ones."""
    for name, unit in zip(("height", "width"), units, strict=True):
        side = getattr(sampling, name)
        if isinstance(side, int) and not (0 < side <= MAX_SIDE and side % unit == 0):
            below = min(max(side // unit * unit, unit), MAX_SIDE)
            above = min(max(-(-side // unit) * unit, unit), MAX_SIDE)
            nearest = " or ".join(dict.fromkeys(map(str, (below, above))))
            raise RequestError(
                f"--{name} must be a multiple of {unit} from {unit} to {MAX_SIDE}, got "
                f"{shown(side)}",
                f"nearest: --{name} {nearest}",
            )


def check_frames(sampling: CommonSampling, unit: int) -> None:
    """Checks that the frame count is a multiple of `unit` plus 1; diffusers rounds other ones."""
    frames = sampling.num_frames
    if frames is None or (frames - 1) % unit == 0:
        return
    below = (frames - 1) // unit * unit + 1
    raise RequestError(
        f"--frames must be a multiple of {unit} plus 1, got {frames}",
        f"nearest: --frames {below} or --frames {below + unit}",
    )
