"""Owns LTX-Video as a `VideoModel`: what travels between ranks, and its reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import torch

from svdpp.config import LtxSampling, ModelConfig, SamplingConfig, TensorSpec
from svdpp.models.base import GENERATOR, LATENTS, Tensors
from svdpp.models.family_config import SchedulerConfig
from svdpp.models.ltx.checkpoint import LtxCheckpoint
from svdpp.models.ltx.load import load_parts, pipeline_class
from svdpp.models.range_model import (
    NEGATIVE_PROMPT_EMBEDS,
    PROMPT_EMBEDS,
    RangeModel,
    RangeParts,
)
from svdpp.models.step_range import call_range, recorder, replaced
from svdpp.plan.layout import Roles

PROMPT_ATTENTION_MASK = "prompt_attention_mask"
NEGATIVE_PROMPT_ATTENTION_MASK = "negative_prompt_attention_mask"

# In the order in which `encode_prompt` returns them.
_TEXT = (
    PROMPT_EMBEDS,
    PROMPT_ATTENTION_MASK,
    NEGATIVE_PROMPT_EMBEDS,
    NEGATIVE_PROMPT_ATTENTION_MASK,
)
# Bytes of a generator's state, by type of device.
_STATE_BYTES = {"cpu": 5056, "cuda": 16}


class LtxModel(RangeModel):
    """LTX-Video, from text or from an image.

    Args:
        checkpoint: from `read_ltx`.
        parts: the loaded components.
        sampling: checked by `check_ltx`.
    """

    def __init__(self, checkpoint: LtxCheckpoint, parts: RangeParts, sampling: LtxSampling) -> None:
        super().__init__(parts, sampling)
        self._checkpoint = checkpoint
        self._generator_device = generator_device(checkpoint, parts.has_image, str(self.device))

    def with_sampling(self, sampling: SamplingConfig) -> Self:
        """The same loaded components with other sampling parameters."""
        assert isinstance(sampling, LtxSampling)
        has_image = sampling.from_image
        parts = self._parts.in_pipeline(pipeline_class(has_image), has_image=has_image)
        return type(self)(self._checkpoint, parts, sampling)

    def packet_spec(self, next_step: int) -> Mapping[str, TensorSpec]:
        """Latents (1, tokens, channels), prompt embeddings, and the generator if decoding draws."""
        del next_step  # Euler's method keeps no state
        checkpoint, sampling = self._checkpoint, self._sampling
        tokens = math.prod(checkpoint.latent_size(sampling))
        length = sampling.max_sequence_length
        embeds = TensorSpec((1, length, checkpoint.text_dim), self._parts.dtype)
        mask = TensorSpec((1, length), "bool")
        specs = {LATENTS: TensorSpec((1, tokens, checkpoint.latent_channels), "fp32")}
        specs |= {PROMPT_EMBEDS: embeds, PROMPT_ATTENTION_MASK: mask}
        if sampling.guidance_scale > 1:
            specs |= {NEGATIVE_PROMPT_EMBEDS: embeds, NEGATIVE_PROMPT_ATTENTION_MASK: mask}
        if checkpoint.timestep_conditioning:
            num_bytes = _STATE_BYTES[torch.device(self._generator_device).type]
            specs[GENERATOR] = TensorSpec((num_bytes,), "uint8")
        return specs

    def _scheduler(self) -> SchedulerConfig:
        return self._checkpoint.scheduler

    def _arguments(self) -> dict[str, Any]:
        return sampling_arguments(self._sampling)

    def _encode(self, arguments: Mapping[str, Any], scheduler: Any) -> Tensors:
        prompts: list[Any] = []
        with replaced(self._pipe, encode_prompt=recorder(self._pipe.encode_prompt, prompts)):
            latent = call_range(self._pipe, scheduler, arguments)
        return {
            LATENTS: latent,
            **dict(zip(_TEXT, prompts[0], strict=True)),
            GENERATOR: arguments["generator"].get_state(),
        }

    def _inputs(self, tensors: Tensors) -> dict[str, Any]:
        generator = None
        if GENERATOR in tensors:
            generator = torch.Generator(self._generator_device)
            generator.set_state(tensors[GENERATOR].cpu())
        # The pipeline's latents are a view of (1, channels, tokens). In another order in memory the
        # transformer's first matrix product rounds differently.
        latents = tensors[LATENTS].transpose(1, 2).contiguous().transpose(1, 2)
        return {
            LATENTS: latents,
            **{name: tensors.get(name) for name in _TEXT},
            "generator": generator,
        }


def load_ltx(
    checkpoint: LtxCheckpoint,
    model: ModelConfig,
    sampling: LtxSampling,
    device: str,
    roles: Roles,
) -> LtxModel:
    """Loads only the components for one rank; see `load_parts` for errors."""
    parts = load_parts(
        checkpoint,
        has_image=sampling.from_image,
        roles=roles,
        dtype=model.dtype,
        device=device,
    )
    return LtxModel(checkpoint, parts, sampling)


def generator_device(checkpoint: LtxCheckpoint, has_image: bool, device: str) -> str:
    """The device of a clip's generator: the CPU wherever diffusers accepts one.

    `LTXImageToVideoPipeline` draws the decoder's noise by `torch.randn` on the pipeline's device,
    which takes no generator of the CPU.
    """
    return device if has_image and checkpoint.timestep_conditioning else "cpu"


def sampling_arguments(sampling: LtxSampling) -> dict[str, Any]:
    """Arguments of `__call__` that only depend on the sampling parameters."""
    return {
        "height": sampling.height,
        "width": sampling.width,
        "num_frames": sampling.num_frames,
        "frame_rate": sampling.fps,
        "num_inference_steps": sampling.num_inference_steps,
        "guidance_scale": sampling.guidance_scale,
        "guidance_rescale": sampling.guidance_rescale,
        "decode_timestep": sampling.decode_timestep,
        "decode_noise_scale": sampling.decode_noise_scale,
        "max_sequence_length": sampling.max_sequence_length,
    }
