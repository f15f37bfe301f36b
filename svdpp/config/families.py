"""The table of families: their parameters, with the defaults of diffusers' `__call__`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Union

from svdpp.config.limits import require, shown
from svdpp.config.params import Param
from svdpp.config.sampling import (
    LtxSampling,
    PromptedSampling,
    SvdSampling,
    VaceSampling,
    WanSampling,
    new_family,
)

_GUIDANCE = 100.0

Sampling_ltx_condition = new_family(
    "ltx_condition",
    {
        **{"height": 512, "width": 704, "num_frames": 161, "fps": 25},
        **{"guidance_scale": 3.0, "max_sequence_length": 256},
    },
    params={
        "guidance_rescale": Param(0.0, 1.0, "Rescaling of the guided video."),
        "decode_timestep": Param(0.0, 1.0, "Noise level of the decode."),
        "decode_noise_scale": Param(0.0, 1.0, "Share of noise in the decode."),
        "strength": Param(1.0, 1.0, "How closely the first frame follows the image."),
        "image_cond_noise_scale": Param(0.15, 1.0, "Noise that each step adds to the image."),
    },
    side_unit=32,
    frames_unit=8,
    latent_axes="BNC",
)
Sampling_ltx2 = new_family(
    "ltx2",
    {
        **{"height": 512, "width": 768, "num_frames": 121, "fps": 24, "num_inference_steps": 30},
        **{"guidance_scale": 3.0, "max_sequence_length": 1024},
    },
    params={
        "stg_scale": Param(1.0, _GUIDANCE, "Spatio-temporal guidance of the video; 0: none."),
        "stg_block": Param(28, 1000, "The block that spatio-temporal guidance perturbs."),
        "modality_scale": Param(3.0, _GUIDANCE, "Guidance of the video by the audio; 1: none."),
        "guidance_rescale": Param(0.7, 1.0, "Rescaling of the guided video."),
        "audio_guidance_scale": Param(7.0, _GUIDANCE, "Guidance of the audio by the prompt."),
        "audio_stg_scale": Param(1.0, _GUIDANCE, "Spatio-temporal guidance of the audio."),
        "audio_modality_scale": Param(3.0, _GUIDANCE, "Guidance of the audio by the video."),
        "audio_guidance_rescale": Param(0.7, 1.0, "Rescaling of the guided audio."),
    },
    side_unit=32,
    frames_unit=8,
    latent_axes="BNC",
)
Sampling_hunyuan_video = new_family(
    "hunyuan_video",
    {
        **{"height": 720, "width": 1280, "num_frames": 129, "fps": 15},
        **{"guidance_scale": 6.0, "max_sequence_length": 256},
    },
    embedded_guidance=True,
)
Sampling_framepack = new_family(
    "framepack",
    {
        **{"height": 720, "width": 1280, "num_frames": 145, "fps": 30, "num_inference_steps": 120},
        **{"guidance_scale": 10.0, "max_sequence_length": 256},
    },
    frames_unit=36,
    embedded_guidance=True,
)
Sampling_hunyuan_video_15 = new_family(
    "hunyuan_video_15",
    {
        **{"height": 480, "width": 848, "num_frames": 121, "fps": 24},
        **{"guidance_scale": 6.0, "max_sequence_length": 1000},
    },
)
Sampling_cogvideox = new_family(
    "cogvideox",
    {
        **{"height": 480, "width": 720, "num_frames": 49, "fps": 8},
        **{"guidance_scale": 6.0, "max_sequence_length": 226},
    },
    latent_axes="BFCHW",
)
Sampling_skyreels_v2 = new_family(
    "skyreels_v2",
    {
        **{"height": 544, "width": 960, "num_frames": 97, "fps": 24},
        **{"guidance_scale": 6.0, "max_sequence_length": 512},
    },
)
Sampling_skyreels_v2_df = new_family(
    "skyreels_v2_df",
    {
        **{"height": 544, "width": 960, "num_frames": 97, "fps": 24},
        **{"guidance_scale": 6.0, "max_sequence_length": 512},
    },
)
Sampling_kandinsky5 = new_family(
    "kandinsky5",
    {
        **{"height": 512, "width": 768, "num_frames": 121, "fps": 24},
        **{"guidance_scale": 5.0, "max_sequence_length": 512},
    },
    latent_axes="BFHWC",
)
Sampling_mochi = new_family(
    "mochi",
    {
        **{"height": 480, "width": 848, "num_frames": 19, "fps": 30, "num_inference_steps": 64},
        **{"guidance_scale": 4.5, "max_sequence_length": 256},
    },
    frames_unit=6,
)
Sampling_latte = new_family(
    "latte",
    {
        **{"height": 512, "width": 512, "num_frames": 16, "fps": 8},
        **{"guidance_scale": 7.5, "max_sequence_length": 120},
    },
    side_unit=8,
    frames_unit=1,
)

SAMPLING_CLASSES: Mapping[str, type[Any]] = {
    "svd": SvdSampling,
    "wan": WanSampling,
    "wan_vace": VaceSampling,
    "ltx": LtxSampling,
    "ltx_condition": Sampling_ltx_condition,
    "ltx2": Sampling_ltx2,
    "hunyuan_video": Sampling_hunyuan_video,
    "framepack": Sampling_framepack,
    "hunyuan_video_15": Sampling_hunyuan_video_15,
    "cogvideox": Sampling_cogvideox,
    "skyreels_v2": Sampling_skyreels_v2,
    "skyreels_v2_df": Sampling_skyreels_v2_df,
    "kandinsky5": Sampling_kandinsky5,
    "mochi": Sampling_mochi,
    "latte": Sampling_latte,
}

#: Any family's parameters; the field `family` tells which.
if TYPE_CHECKING:
    SamplingConfig = SvdSampling | PromptedSampling
else:  # by this, pydantic finds the class of a message's parameters
    SamplingConfig = Union[tuple(SAMPLING_CLASSES.values())]  # noqa: UP007


def sampling_from(values: Mapping[str, Any]) -> SamplingConfig:
    """The sampling parameters with these fields; without `family`, those of SVD.

    Raises:
        RequestError: the family is unknown, or a value is out of range.
        TypeError: a field that the family does not have.
    """
    family = values.get("family", "svd")
    known = ", ".join(SAMPLING_CLASSES)
    require(
        isinstance(family, str) and family in SAMPLING_CLASSES,
        f"family must be one of {known}, got {shown(family)}",
    )
    sampling: SamplingConfig = SAMPLING_CLASSES[family](**values)
    return sampling
