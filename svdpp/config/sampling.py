"""The parameters of diffusers' samplers: their limits, and the table of families with defaults."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, Union, get_args

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


@dataclass(frozen=True)
class Param:
    """A number that samplers take: checks, options, fields of requests and help follow from it.

    `params_of` fills in name and default.
    """

    default: Any
    """Default in its family; None: that of the model, or of another parameter."""
    highest: float
    help: str
    lowest: float = 0
    kind: type[int] | type[float] = float
    api: str = ""
    """Its name in HTTP requests and benches, if it is another one."""
    excludes_lowest: bool = False
    """Whether it must be above `lowest`."""
    shown_default: str = ""
    """The default in words, for the help."""
    name: str = ""

    @property
    def option(self) -> str:
        """Option as users type it."""
        is_shared = self.name in SHARED
        return f"--{self.field.replace('_', '-')}" if is_shared else f"--param {self.name}"

    @property
    def field(self) -> str:
        """Name in HTTP requests and benches."""
        return self.api or self.name

    def check(self, value: Any) -> None:
        """Check a value of this parameter; errors name the option.

        Args:
            value: value of any type; None is allowed if the default is None.

        Raises:
            RequestError: it has another type, or is out of range.
        """
        if value is None and self.default is None:
            return
        if self.kind is int:
            check_int(self.option, value, int(self.lowest), int(self.highest))
            return
        lowest = 0 if self.excludes_lowest else self.lowest
        if not (is_number(value) and lowest <= value <= self.highest):
            must = f"a finite number, {lowest:g} to {self.highest:g}"
            raise RequestError(
                f"{self.option} must be {must}, got {shown(value)}",
                details={
                    "field": self.field,
                    "value": detail_value(value),
                    "lowest": lowest,
                    "highest": self.highest,
                },
            )
        require(
            not (self.excludes_lowest and value <= self.lowest),
            f"{self.option} must be above {self.lowest:g}, got {value}",
            field=self.field,
            value=value,
            above=self.lowest,
        )


#: Scale of classifier-free guidance; usual are 1 to 10.
MAX_GUIDANCE = 100.0


def _whole(lowest: int, highest: int, help: str, **more: Any) -> Param:
    return Param(None, highest, help, lowest, int, **more)


#: The parameters with an option of their own, by the name of their field.
SHARED: Mapping[str, Param] = {
    "num_inference_steps": _whole(1, MAX_STEPS, "Denoising steps of each clip.", api="steps"),
    "height": _whole(8, MAX_SIDE, "Frame height, a multiple of 8."),
    "width": _whole(8, MAX_SIDE, "Frame width, a multiple of 8."),
    "num_frames": _whole(1, MAX_FRAMES, "Frames of each clip.", api="frames"),
    "fps": Param(None, 240, "Frames per second, 1 to 240, such as 24 or 23.976.", 1),
    "decode_chunk_size": _whole(1, MAX_FRAMES, "Frames to decode at a time; bits depend on it."),
    "guidance_scale": Param(None, MAX_GUIDANCE, "Guidance by the prompt; up to 1 it is off."),
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


def as_whole(number: float) -> float:
    """Return a number as an int if it has no fraction, so that it is one in JSON too."""
    return int(number) if float(number).is_integer() else number


@cache
def params_of(kind: Any) -> dict[str, Param]:
    """Return the parameters of a sampling class, by the name of the field."""
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


def extra_params(kind: Any) -> dict[str, Param]:
    """Return the parameters that the family alone has, by name."""
    others = params_of(PromptedSampling)
    return {name: param for name, param in params_of(kind).items() if name not in others}


@dataclass(frozen=True, kw_only=True)
class CommonSampling:
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
    """Number of frames; None: that of the model's config."""
    fps: float
    """Frames per second; a whole number is an int, as in the JSON of clips."""
    decode_chunk_size: int | None = None
    """Frames to decode at a time; None: all."""
    fit: Fit = "stretch"
    """How an image of another shape is fitted to the frame."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        check_sides(self, (self.side_unit, self.side_unit))
        for name, param in params_of(kind).items():
            param.check(getattr(self, name))
        object.__setattr__(self, "fps", as_whole(self.fps))
        check_choice("--fit", self.fit, get_args(Fit))
        self._check_frames()
        frames = self.num_frames or 1
        num_pixels = self.height * self.width * frames
        too_many = f"{frames} frames of {self.height} x {self.width} are {num_pixels} pixels"
        require(
            num_pixels <= MAX_CLIP_PIXELS,
            f"{too_many}, more than {MAX_CLIP_PIXELS}",
            frames=frames,
            height=self.height,
            width=self.width,
            pixels=num_pixels,
            highest_pixels=MAX_CLIP_PIXELS,
        )

    def _check_frames(self) -> None:
        unit, frames = self.frames_unit, self.num_frames or 1
        below = (frames - 1) // unit * unit + 1  # diffusers rounds other numbers
        require(
            frames == below,
            f"--frames must be a multiple of {unit} plus 1, got {frames}",
            f"nearest: --frames {below} or --frames {below + unit}",
            frames=frames,
            unit=unit,
            remainder=1,
            nearest=[below, below + unit],
        )

    @property
    def frames(self) -> int:
        """Number of frames, once the model's is known.

        Raises:
            ValueError: it is not known yet.
        """
        if self.num_frames is None:
            raise ValueError("num_frames is None: resolve it with the model first")
        return self.num_frames

    @property
    def video_frames(self) -> int | None:
        """Number of frames that a clip takes of a video; None: it starts from no video."""
        return self.frames if self.from_video else None

    def check_videos(self, names: Collection[str]) -> None:
        """Check that a clip has the further videos that the family takes, and no others.

        Args:
            names: names of the videos that the clip has.

        Raises:
            RequestError: one is missing, or the family takes none of that name.
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
            require(name in names, wrong, f"give --video {name}=FILE")

    def with_model_defaults(self, *, model_frames: int) -> Self:
        """Return a copy with numbers in place of None, as diffusers sets them.

        Args:
            model_frames: number of frames in the model's config.
        """
        return replace(self, num_frames=self.num_frames or model_frames)


@dataclass(frozen=True, kw_only=True)
class SvdSampling(CommonSampling):
    """The parameters of diffusers' `StableVideoDiffusionPipeline.__call__`, with its defaults."""

    latent_axes: ClassVar[str] = "BFCHW"
    from_image: ClassVar[bool] = True

    family: Literal["svd"] = "svd"
    num_inference_steps: int = DEFAULT_NUM_STEPS
    height: int = 576
    width: int = 1024
    fps: float = 7
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
            min_guidance_scale=low,
            max_guidance_scale=high,
            limit=1,
        )
        require(
            not (self.num_frames == 1 and high > 1 >= low),
            "a clip of one frame uses only --min-guidance-scale, which is 1 or less, but "
            "--max-guidance-scale is above 1: diffusers cannot run that",
            "use --max-guidance-scale 1 to run without guidance",
            min_guidance_scale=low,
            max_guidance_scale=high,
            frames=1,
        )

    @property
    def uses_guidance(self) -> bool:
        """Whether classifier-free guidance does two forward passes for each step."""
        return self.max_guidance_scale > 1

    def with_model_defaults(self, *, model_frames: int) -> Self:
        """Return a copy with numbers for `num_frames` and `decode_chunk_size`, as in diffusers.

        Args:
            model_frames: number of frames in the model's config.
        """
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
        wrong = (
            "--decode-chunk-size is for Stable Video Diffusion; others decode all frames at once"
        )
        require(self.decode_chunk_size is None, wrong)

    @property
    def uses_guidance(self) -> bool:
        """Whether each step has two forward passes, as the first expert's scale says."""
        return self.guidance_scale > 1 and not self.embedded_guidance


def check_sides(sampling: CommonSampling, units: tuple[int, int]) -> None:
    """Check height and width.

    Args:
        sampling: parameters with the sides, in pixels.
        units: height and width are multiples of these.

    Raises:
        RequestError: a side is not a multiple, or not from its unit to `MAX_SIDE`.
    """
    for name, unit in zip(("height", "width"), units, strict=True):
        side = getattr(sampling, name)
        if isinstance(side, int) and not (0 < side <= MAX_SIDE and side % unit == 0):
            must = f"a multiple of {unit} from {unit} to {MAX_SIDE}"
            raise RequestError(
                f"--{name} must be {must}, got {shown(side)}",
                details={
                    "field": name,
                    "value": detail_value(side),
                    "unit": unit,
                    "lowest": unit,
                    "highest": MAX_SIDE,
                },
            )


@dataclass(frozen=True, kw_only=True)
class WanSampling(PromptedSampling):
    """The parameters of diffusers' `WanPipeline` and `WanImageToVideoPipeline`, with defaults."""

    side_unit: ClassVar[int] = 16
    frames_unit: ClassVar[int] = 4
    own: ClassVar[Mapping[str, Param]] = {
        "guidance_scale_2": Param(
            None,
            MAX_GUIDANCE,
            "Guidance in the steps of the low-noise expert.",
            shown_default="guidance_scale",
        ),
        "flow_shift": Param(
            None,
            100.0,
            "Shift of the noise levels, such as 3 at 480p and 5 at 720p.",
            excludes_lowest=True,
            shown_default="that of the model's scheduler",
        ),
    }

    family: Literal["wan"] = "wan"
    height: int = 480
    width: int = 832
    num_frames: int = 81
    fps: float = 16
    """Frames per second of the file; the model does not depend on it."""
    guidance_scale: float = 5.0
    guidance_scale_2: float | None = None
    flow_shift: float | None = None
    max_sequence_length: int = 512


@dataclass(frozen=True, kw_only=True)
class LtxSampling(PromptedSampling):
    """The parameters of diffusers' `LTXPipeline` and `LTXImageToVideoPipeline`, with defaults."""

    side_unit: ClassVar[int] = 32
    frames_unit: ClassVar[int] = 8
    latent_axes: ClassVar[str] = "BNC"
    own: ClassVar[Mapping[str, Param]] = {
        "guidance_rescale": Param(0.0, 1, "Rescaling of the guided prediction."),
        "decode_timestep": Param(
            0.0, 1, "Noise level of the decode, for a VAE that is conditioned on it."
        ),
        "decode_noise_scale": Param(
            None, 1, "Noise added before the decode.", shown_default="decode_timestep"
        ),
    }

    family: Literal["ltx"] = "ltx"
    height: int = 512
    width: int = 704
    num_frames: int = 161
    fps: float = 25
    guidance_scale: float = 3.0
    guidance_rescale: float = 0.0
    decode_timestep: float = 0.0
    decode_noise_scale: float | None = None
    max_sequence_length: int = 128


# The numbers of `_define_sampling`, in this order.
_COLUMNS = ("height", "width", "num_frames", "fps", "guidance_scale", "max_sequence_length")
_LTX: dict[str, Any] = {"side_unit": 32, "frames_unit": 8, "latent_axes": "BNC"}
_FRAMEPACK: dict[str, Any] = {"frames_unit": 36, "embedded_guidance": True}
_VACE = {"conditioning_scale": Param(1.0, 10, "Weight of the reference image.")}
_CONTROL = {"conditioning_scale": Param(1.0, 10, "Weight of the video.")}
_V2V = {
    "strength": Param(
        0.8, 1, "How much of the video is replaced: all of it by 1.", excludes_lowest=True
    )
}
_LTX_CONDITION = {
    "guidance_rescale": Param(0.0, 1, "Rescaling of the guided video."),
    "decode_timestep": Param(0.0, 1, "Noise level of the decode."),
    "decode_noise_scale": Param(0.0, 1, "Share of noise in the decode."),
    "strength": Param(1.0, 1, "How closely the first frame follows the image."),
    "image_cond_noise_scale": Param(0.15, 1, "Noise that each step adds to the image."),
}
_LTX2 = {
    "stg_scale": Param(1.0, MAX_GUIDANCE, "Spatio-temporal guidance of the video; 0: none."),
    "stg_block": Param(28, 1000, "The block that spatio-temporal guidance perturbs.", kind=int),
    "modality_scale": Param(3.0, MAX_GUIDANCE, "Guidance of the video by the audio; 1: none."),
    "guidance_rescale": Param(0.7, 1, "Rescaling of the guided video."),
    "audio_guidance_scale": Param(7.0, MAX_GUIDANCE, "Guidance of the audio by the prompt."),
    "audio_stg_scale": Param(1.0, MAX_GUIDANCE, "Spatio-temporal guidance of the audio."),
    "audio_modality_scale": Param(3.0, MAX_GUIDANCE, "Guidance of the audio by the video."),
    "audio_guidance_rescale": Param(0.7, 1, "Rescaling of the guided audio."),
}


def _define_sampling(
    family: str,
    *numbers: float,
    steps: int = 50,
    own: Mapping[str, Param] | None = None,
    base: type[PromptedSampling] = PromptedSampling,
    **settings: Any,
) -> type[PromptedSampling]:
    """Make the class of a family's parameters; `settings` are class variables."""
    numbered = {**dict(zip(_COLUMNS, numbers, strict=True)), "num_inference_steps": steps}
    numbered |= {each: param.default for each, param in (own or {}).items()}
    types = {each: float if each == "fps" else type(value) for each, value in numbered.items()}
    name = f"Sampling_{family}"
    made = make_dataclass(
        name,
        [
            ("family", Literal[family], field(default=family)),
            *((each, types[each], field(default=value)) for each, value in numbered.items()),
        ],
        bases=(base,),
        namespace={
            **{"side_unit": 16, "frames_unit": 4, **settings},
            **{"own": {**base.own, **(own or {})}, "__module__": __name__},
        },
        frozen=True,
        kw_only=True,
        # Without own fields those of the base do: making them takes part of a command's start.
        eq=bool(own),
        repr=bool(own),
    )
    globals()[name] = made  # where it is found when it is unpickled
    return made


_WAN = (480, 832, 81, 16, 5.0, 512)
# Of one segment, whose character a video moves, or replaces.
_ANIMATE = (720, 1280, 77, 30, 1.0, 512)
_ANIMATED = {"pose_video": None, "face_video": 512}
_REPLACED = {**_ANIMATED, "background_video": None, "mask_video": None}
_COG = (480, 720, 49, 8, 6.0, 226)
_DEFINED = (
    _define_sampling("wan_vace", *_WAN, own=_VACE, base=WanSampling),
    _define_sampling("wan_vace_control", *_WAN, own=_CONTROL, base=WanSampling, from_video=True),
    _define_sampling("wan_v2v", *_WAN, steps=40, own=_V2V, base=WanSampling, from_video=True),
    _define_sampling("wan_animate", *_ANIMATE, steps=20, base=WanSampling, videos=_ANIMATED),
    _define_sampling("wan_replace", *_ANIMATE, steps=20, base=WanSampling, videos=_REPLACED),
    _define_sampling("ltx_condition", 512, 704, 161, 25, 3.0, 256, own=_LTX_CONDITION, **_LTX),
    _define_sampling("ltx2", 512, 768, 121, 24, 3.0, 1024, steps=30, own=_LTX2, **_LTX),
    _define_sampling("hunyuan_video", 720, 1280, 129, 15, 6.0, 256, embedded_guidance=True),
    _define_sampling("framepack", 720, 1280, 145, 30, 10.0, 256, steps=120, **_FRAMEPACK),
    _define_sampling("hunyuan_video_15", 480, 848, 121, 24, 6.0, 1000),
    _define_sampling("cogvideox", *_COG, latent_axes="BFCHW"),
    _define_sampling(
        "cogvideox_v2v", *_COG, steps=40, own=_V2V, latent_axes="BFCHW", from_video=True
    ),
    _define_sampling("skyreels_v2", 544, 960, 97, 24, 6.0, 512),
    _define_sampling("skyreels_v2_df", 544, 960, 97, 24, 6.0, 512),
    _define_sampling("kandinsky5", 512, 768, 121, 24, 5.0, 512, latent_axes="BFHWC"),
    _define_sampling("mochi", 480, 848, 19, 30, 4.5, 256, steps=64, frames_unit=6),
    _define_sampling("latte", 512, 512, 16, 8, 7.5, 120, side_unit=8, frames_unit=1),
)
_CLASSES = (SvdSampling, WanSampling, *_DEFINED[:5], LtxSampling, *_DEFINED[5:])

#: The class of each family's parameters.
SAMPLING_CLASSES: Mapping[str, type[Any]] = {kind.family: kind for kind in _CLASSES}

#: Any family's parameters; the field `family` tells which.
if TYPE_CHECKING:
    SamplingConfig = SvdSampling | PromptedSampling
else:  # by this, pydantic finds the class of a message's parameters
    SamplingConfig = Union[tuple(SAMPLING_CLASSES.values())]  # noqa: UP007


def sampling_from(values: Mapping[str, Any]) -> SamplingConfig:
    """Return the sampling parameters with these fields.

    Args:
        values: fields by name; without `family` they are SVD's.

    Raises:
        RequestError: a name is unknown, or a value out of range.
    """
    family = values.get("family", "svd")
    check_choice("family", family, (*SAMPLING_CLASSES,))
    kind = SAMPLING_CLASSES[family]
    unknown = ", ".join(sorted(values.keys() - {field.name for field in fields(kind)}))
    require(not unknown, f"{family} has no parameter {shown(unknown)}")
    sampling: SamplingConfig = kind(**values)
    return sampling
