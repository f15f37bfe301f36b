"""The table of families: their parameters, with the defaults of diffusers' `__call__`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union

from svdpp.config.limits import require, shown
from svdpp.config.sampling import MAX_GUIDANCE, Param, PromptedSampling, SvdSampling


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
            above=True,
            shown_default="that of the model's scheduler",
        ),
    }

    family: Literal["wan"] = "wan"
    height: int = 480
    width: int = 832
    num_frames: int = 81
    fps: int = 16
    """Of the file; the model does not depend on it."""
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
    fps: int = 25
    guidance_scale: float = 3.0
    guidance_rescale: float = 0.0
    decode_timestep: float = 0.0
    decode_noise_scale: float | None = None
    max_sequence_length: int = 128


# The numbers of a row, in this order.
_COLUMNS = ("height", "width", "num_frames", "fps", "guidance_scale", "max_sequence_length")
_LTX: dict[str, Any] = {"side_unit": 32, "frames_unit": 8, "latent_axes": "BNC"}
_FRAMEPACK: dict[str, Any] = {"frames_unit": 36, "embedded_guidance": True}
_VACE = {"conditioning_scale": Param(1.0, 10, "Weight of the reference image.")}
_CONTROL = {"conditioning_scale": Param(1.0, 10, "Weight of the video.")}
_V2V = {"strength": Param(0.8, 1, "How much of the video is replaced: all of it by 1.", above=True)}
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


def _row(
    family: str,
    *numbers: float,
    steps: int = 50,
    own: Mapping[str, Param] | None = None,
    base: type[PromptedSampling] = PromptedSampling,
    **settings: Any,
) -> type[PromptedSampling]:
    """The class of a family's parameters; `settings` are class variables of `CommonSampling`."""
    numbered = {**dict(zip(_COLUMNS, numbers, strict=True)), "num_inference_steps": steps}
    numbered |= {each: param.default for each, param in (own or {}).items()}
    name = f"Sampling_{family}"
    made = make_dataclass(
        name,
        [
            ("family", Literal[family], field(default=family)),
            *((each, type(value), field(default=value)) for each, value in numbered.items()),
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
_ROWS = (
    _row("wan_vace", *_WAN, own=_VACE, base=WanSampling),
    _row("wan_vace_control", *_WAN, own=_CONTROL, base=WanSampling, from_video=True),
    _row("wan_v2v", *_WAN, steps=40, own=_V2V, base=WanSampling, from_video=True),
    _row("wan_animate", *_ANIMATE, steps=20, base=WanSampling, videos=_ANIMATED),
    _row(
        *("wan_replace", *_ANIMATE),
        steps=20,
        base=WanSampling,
        videos={**_ANIMATED, "background_video": None, "mask_video": None},
    ),
    _row("ltx_condition", 512, 704, 161, 25, 3.0, 256, own=_LTX_CONDITION, **_LTX),
    _row("ltx2", 512, 768, 121, 24, 3.0, 1024, steps=30, own=_LTX2, **_LTX),
    _row("hunyuan_video", 720, 1280, 129, 15, 6.0, 256, embedded_guidance=True),
    _row("framepack", 720, 1280, 145, 30, 10.0, 256, steps=120, **_FRAMEPACK),
    _row("hunyuan_video_15", 480, 848, 121, 24, 6.0, 1000),
    _row("cogvideox", 480, 720, 49, 8, 6.0, 226, latent_axes="BFCHW"),
    _row(
        *("cogvideox_v2v", 480, 720, 49, 8, 6.0, 226),
        steps=40,
        own=_V2V,
        latent_axes="BFCHW",
        from_video=True,
    ),
    _row("skyreels_v2", 544, 960, 97, 24, 6.0, 512),
    _row("skyreels_v2_df", 544, 960, 97, 24, 6.0, 512),
    _row("kandinsky5", 512, 768, 121, 24, 5.0, 512, latent_axes="BFHWC"),
    _row("mochi", 480, 848, 19, 30, 4.5, 256, steps=64, frames_unit=6),
    _row("latte", 512, 512, 16, 8, 7.5, 120, side_unit=8, frames_unit=1),
)
_CLASSES = (SvdSampling, WanSampling, *_ROWS[:5], LtxSampling, *_ROWS[5:])

#: The class of each family's parameters.
SAMPLING_CLASSES: Mapping[str, type[Any]] = {kind.family: kind for kind in _CLASSES}

#: Any family's parameters; the field `family` tells which.
if TYPE_CHECKING:
    SamplingConfig = SvdSampling | PromptedSampling
else:  # by this, pydantic finds the class of a message's parameters
    SamplingConfig = Union[tuple(SAMPLING_CLASSES.values())]  # noqa: UP007


def sampling_from(values: Mapping[str, Any]) -> SamplingConfig:
    """The sampling parameters with these fields; without `family`, those of SVD."""
    family = values.get("family", "svd")
    known = ", ".join(SAMPLING_CLASSES)
    require(
        isinstance(family, str) and family in SAMPLING_CLASSES,
        f"family must be one of {known}, got {shown(family)}",
    )
    kind = SAMPLING_CLASSES[family]
    unknown = ", ".join(sorted(values.keys() - {field.name for field in fields(kind)}))
    require(not unknown, f"{family} has no parameter {shown(unknown)}")
    sampling: SamplingConfig = kind(**values)
    return sampling
