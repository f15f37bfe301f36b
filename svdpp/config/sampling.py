"""The parameters of diffusers' samplers, by model family: their defaults and limits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from svdpp.config.limits import (
    MAX_CLIP_PIXELS,
    MAX_FLOW_SHIFT,
    MAX_FPS,
    MAX_FRAMES,
    MAX_GUIDANCE_SCALE,
    MAX_MOTION_BUCKET_ID,
    MAX_NOISE_AUG_STRENGTH,
    MAX_PROMPT_TOKENS,
    MAX_SIDE,
    MAX_STEPS,
    Param,
    params_of,
    require,
    shared,
    shown,
    within,
)
from svdpp.config.model import DEMO_MODEL
from svdpp.errors import RequestError

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

Steps = Annotated[int, shared(1, MAX_STEPS, "Denoising steps of each clip.", "steps")]
Height = Annotated[int, shared(8, MAX_SIDE, "Frame height, a multiple of 8.")]
Width = Annotated[int, shared(8, MAX_SIDE, "Frame width, a multiple of 8.")]
Frames = Annotated[int, shared(1, MAX_FRAMES, "Frames of each clip.", "frames")]
Fps = Annotated[int, shared(1, MAX_FPS, "Frames per second, 1 to 240.", unit="frames a second")]
Chunk = Annotated[
    int, shared(1, MAX_FRAMES, "Frames to decode at a time; bits and memory depend on it.")
]
Scale = Annotated[
    float, shared(0, MAX_GUIDANCE_SCALE, "Guidance by the prompt; 1 or less turns guidance off.")
]
_TOKENS_HELP = "Tokens of a prompt that the model reads; the rest is cut off."
Tokens = Annotated[int, shared(1, MAX_PROMPT_TOKENS, _TOKENS_HELP, "max_prompt_tokens")]
Motion = Annotated[int, shared(0, MAX_MOTION_BUCKET_ID, "Amount of motion, 0 to 1023.")]
Noise = Annotated[float, shared(0, MAX_NOISE_AUG_STRENGTH, "Noise added to the image.")]
FirstScale = Annotated[float, shared(0, MAX_GUIDANCE_SCALE, "Guidance of the first frame.")]
_LAST_HELP = "Guidance of the last frame; 1 or less turns guidance off."
STRENGTH = within(0, 1, "How much of the video is replaced: all of it by 1.", above=True)
LastScale = Annotated[float, shared(0, MAX_GUIDANCE_SCALE, _LAST_HELP)]


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

    family: str
    num_inference_steps: Steps
    height: Height
    width: Width
    num_frames: Frames | None = None
    """None: that of the model's config."""
    fps: Fps
    decode_chunk_size: Chunk | None = None
    """Frames to decode at a time; None: all."""
    fit: Fit = "stretch"
    """How a photograph of another shape is fitted to the frame."""

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
            near = get_close_matches(name, self.videos, n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
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
    num_inference_steps: Steps = DEFAULT_NUM_STEPS
    height: Height = 576
    width: Width = 1024
    fps: Fps = 7
    motion_bucket_id: Motion = 127
    noise_aug_strength: Noise = 0.02
    min_guidance_scale: FirstScale = 1.0
    max_guidance_scale: LastScale = 3.0

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

    num_inference_steps: Steps = 50
    num_frames: Frames
    guidance_scale: Scale
    max_sequence_length: Tokens
    from_image: bool = False
    """Whether clips start from a photograph; otherwise they are made from text alone."""

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


def own_params(kind: Any) -> dict[str, Param]:
    """The parameters that the family alone has, by name."""
    shared = {**params_of(CommonSampling), **params_of(PromptedSampling)}
    return {name: param for name, param in params_of(kind).items() if name not in shared}


@dataclass(frozen=True, kw_only=True)
class WanSampling(PromptedSampling):
    """The parameters of diffusers' `WanPipeline` and `WanImageToVideoPipeline`, with defaults."""

    side_unit: ClassVar[int] = 16
    frames_unit: ClassVar[int] = 4

    family: Literal["wan"] = "wan"
    height: Height = 480
    width: Width = 832
    num_frames: Frames = 81
    fps: Fps = 16
    """Of the file; the model does not depend on it."""
    guidance_scale: Scale = 5.0
    guidance_scale_2: Annotated[
        float | None,
        within(
            *(0, MAX_GUIDANCE_SCALE, "Guidance in the steps of the low-noise expert."),
            shown_default="guidance_scale",
        ),
    ] = None
    flow_shift: Annotated[
        float | None,
        within(
            *(0, MAX_FLOW_SHIFT, "Shift of the noise levels, such as 3 at 480p and 5 at 720p."),
            above=True,
            shown_default="that of the model's scheduler",
        ),
    ] = None
    max_sequence_length: Tokens = 512


@dataclass(frozen=True, kw_only=True)
class LtxSampling(PromptedSampling):
    """The parameters of diffusers' `LTXPipeline` and `LTXImageToVideoPipeline`, with defaults."""

    side_unit: ClassVar[int] = 32
    frames_unit: ClassVar[int] = 8
    latent_axes: ClassVar[str] = "BNC"

    family: Literal["ltx"] = "ltx"
    height: Height = 512
    width: Width = 704
    num_frames: Frames = 161
    fps: Fps = 25
    guidance_scale: Scale = 3.0
    guidance_rescale: Annotated[float, within(0, 1, "Rescaling of the guided prediction.")] = 0.0
    decode_timestep: Annotated[
        float, within(0, 1, "Noise level of the decode, for a VAE that is conditioned on it.")
    ] = 0.0
    decode_noise_scale: Annotated[
        float | None,
        within(0, 1, "Noise added before the decode.", shown_default="decode_timestep"),
    ] = None
    max_sequence_length: Tokens = 128


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


def sampling_defaults(model_name: str) -> Mapping[str, Any]:
    """The defaults of `model_name` that differ from diffusers'; empty except for the demo model."""
    return DEMO_SAMPLING if model_name == DEMO_MODEL else {}
