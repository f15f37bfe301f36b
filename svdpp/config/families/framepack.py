"""Sampling parameters and spec of FramePack, which makes a clip in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from svdpp.config.families.chunks import check_steps_of_chunks
from svdpp.config.families.spec import TWO_TEXT_ENCODERS, FamilySpec, two_images
from svdpp.config.limits import MAX_FRAMES
from svdpp.config.sampling import PromptedSampling

# Number of frames that each chunk adds to a clip.
_CHUNK = 36
# Number of frames by which the pipeline divides `num_frames` to get the number of chunks.
_WINDOW = 33
# Number of latent frames of each chunk: the default of the pipeline's `latent_window_size`.
_LATENT_FRAMES = 9


@dataclass(frozen=True, kw_only=True)
class FramepackSampling(PromptedSampling):
    """Sampling parameters of diffusers' `HunyuanVideoFramepackPipeline`, with its defaults."""

    side_unit: ClassVar[int] = 16
    frames_unit: ClassVar[int] = _CHUNK
    embedded_guidance: ClassVar[bool] = True

    family: Literal["framepack"] = "framepack"
    num_inference_steps: int = 120
    height: int = 720
    width: int = 1280
    num_frames: int = 145
    fps: float = 30
    guidance_scale: float = 10.0
    max_sequence_length: int = 256

    @property
    def steps_unit(self) -> int:
        """Number of chunks of the clip; `num_inference_steps` must be a multiple of this number."""
        return _chunks_of(self)


def _chunks_of(sampling: Any) -> int:
    return int((sampling.num_frames - 1) // _CHUNK)


def _call_arguments(sampling: Any) -> dict[str, Any]:
    """Return the arguments of the FramePack pipeline's `__call__` that set the chunks of a clip.

    The pipeline makes `num_frames` / `_WINDOW` chunks, and runs `num_inference_steps` steps for
    each chunk. So both arguments differ from the clip's parameters of the same names.
    """
    chunks = _chunks_of(sampling)
    return {
        "num_frames": chunks * _WINDOW,
        "num_inference_steps": sampling.num_inference_steps // chunks,
    }


FRAMEPACK = FamilySpec(
    sampling=FramepackSampling,
    title="FramePack",
    example="lllyasviel/FramePackI2V_HY",
    example_remark="a denoiser, which must first be saved with the other components",
    license="Tencent Hunyuan Community License",
    denoiser="HunyuanVideoFramepackTransformer3DModel",
    image_pipeline="HunyuanVideoFramepackPipeline",
    last_image_arguments=two_images,
    encode_components=TWO_TEXT_ENCODERS,
    # The pipeline calls `encode_image` for the first image (call 0), and then for the last image
    # (call 1). The denoising loop uses only the result of call 0.
    record_uses={"encode_image": 0},
    latent_frames=lambda *_: _LATENT_FRAMES,
    frame_limits=(1 + _CHUNK, MAX_FRAMES, "from one chunk to the limit of svdpp"),
    check_sampling=check_steps_of_chunks,
    call_arguments=_call_arguments,
)

FAMILIES = (FRAMEPACK,)
