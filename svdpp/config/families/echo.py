"""Sampling parameters and spec of Echo, which makes video and sound in a fixed number of steps.

Echo uses components of LTX-2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from svdpp.config.families.fixed import check_fixed
from svdpp.config.families.ltx2 import LTX2
from svdpp.config.families.spec import FamilySpec, ModularSpec
from svdpp.config.sampling import PromptedSampling


@dataclass(frozen=True, kw_only=True)
class EchoSampling(PromptedSampling):
    """Sampling parameters of diffusers' `EchoModularPipeline`, with its defaults."""

    side_unit: ClassVar[int] = 32
    frames_unit: ClassVar[int] = 8
    latent_axes: ClassVar[str] = "BNC"
    has_fixed_steps: ClassVar[bool] = True

    family: Literal["echo"] = "echo"
    num_inference_steps: int = 8
    height: int = 512
    width: int = 704
    num_frames: int = 241
    fps: float = 25
    guidance_scale: float = 1.0
    max_sequence_length: int = 1024


#: Parameters that users cannot choose in this family, each with the reason.
_FIXED = {
    "num_inference_steps": "the model is distilled for the 8 noise levels in diffusers' pipeline",
    "guidance_scale": "the model runs without guidance",
}


def _check_sampling(_: object, sampling: Any) -> None:
    check_fixed(sampling, _FIXED)


ECHO = FamilySpec(
    sampling=EchoSampling,
    title="Echo",
    example="jdopensource/JoyAI-Echo",
    license=LTX2.license,
    denoiser=LTX2.denoiser,
    text_pipeline="EchoModularPipeline",
    image_pipeline="EchoModularPipeline",
    text_and_image=True,
    schedulers=(),
    encode_components=LTX2.encode_components,
    decode_components=LTX2.decode_components,
    component_classes=LTX2.component_classes,
    pipeline_package=LTX2.pipeline_package,
    # svdpp loads `audio_vae` in float32, as the example in diffusers' documentation does.
    fp32_components=frozenset({"audio_vae"}),
    loras=False,
    latent_dtype="model",
    modular=ModularSpec(blocks=("EchoBlocks",), audio="audio", guiders={}),
    checkpoint_facts=LTX2.checkpoint_facts,
    check_sampling=_check_sampling,
    renamed_arguments=LTX2.renamed_arguments,
)

FAMILIES = (ECHO,)
