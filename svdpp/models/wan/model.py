"""Owns Wan as a `VideoModel`: what travels between ranks, its experts, and its reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch

from svdpp.config import ModelConfig, SamplingConfig, TensorSpec, WanSampling
from svdpp.models.base import LATENTS, AfterStep, Tensors
from svdpp.models.family_config import SchedulerConfig
from svdpp.models.range_model import (
    NEGATIVE_PROMPT_EMBEDS,
    PROMPT_EMBEDS,
    RangeModel,
    RangeParts,
)
from svdpp.models.step_range import call_range, recorder, replaced, state_spec
from svdpp.models.wan.checkpoint import WanCheckpoint
from svdpp.models.wan.load import load_parts, pipeline_class
from svdpp.models.wan.schedule import boundary_step, scheduler_config
from svdpp.plan.layout import Roles

CONDITION = "condition"
FIRST_FRAME_MASK = "first_frame_mask"
IMAGE_EMBEDS = "image_embeds"


class WanModel(RangeModel):
    """Wan 2.1 or 2.2, from text or from an image.

    Args:
        checkpoint: from `read_wan`.
        parts: the loaded components.
        sampling: checked by `check_wan`.
    """

    def __init__(self, checkpoint: WanCheckpoint, parts: RangeParts, sampling: WanSampling) -> None:
        super().__init__(parts, sampling)
        self._checkpoint = checkpoint

    def with_sampling(self, sampling: SamplingConfig) -> Self:
        """The same loaded components with other sampling parameters."""
        assert isinstance(sampling, WanSampling)
        has_image = sampling.from_image
        parts = self._parts.in_pipeline(pipeline_class(has_image), has_image=has_image)
        return type(self)(self._checkpoint, parts, sampling)

    def packet_spec(self, next_step: int) -> Mapping[str, TensorSpec]:
        """Latents, prompt embeddings, what the image adds, and the scheduler's state."""
        checkpoint, sampling = self._checkpoint, self._sampling
        scheduler = checkpoint.scheduler
        shape = self._latent_shape(checkpoint.latent_channels)
        sample = TensorSpec(shape, "fp32")
        # `FlowMatchEulerDiscreteScheduler.step` returns the dtype of the transformer's output.
        rounds = scheduler.name == "FlowMatchEulerDiscreteScheduler" and next_step > 0
        text = TensorSpec((1, sampling.max_sequence_length, checkpoint.text_dim), self._parts.dtype)
        specs = {LATENTS: TensorSpec(shape, self._parts.dtype if rounds else "fp32")}
        specs[PROMPT_EMBEDS] = text
        if sampling.guidance_scale > 1:
            specs[NEGATIVE_PROMPT_EMBEDS] = text
        if self._parts.has_image:
            specs |= self._image_specs()
        return specs | state_spec(scheduler.name, scheduler.values, next_step, sample)

    def denoise(self, tensors: Tensors, start: int, end: int, after_step: AfterStep) -> Tensors:
        """See `RangeModel.denoise`.

        Raises:
            ValueError: this rank has not loaded an expert that the steps need.
        """
        boundary = boundary_step(self._checkpoint, self._sampling)
        for name, is_needed in (
            ("transformer", boundary is None or start < boundary),
            ("transformer_2", boundary is not None and end > boundary),
        ):
            if is_needed and not isinstance(getattr(self._pipe, name), torch.nn.Module):
                raise ValueError(f"steps {start} to {end - 1} need {name}, which is not loaded")
        return super().denoise(tensors, start, end, after_step)

    def _image_specs(self) -> dict[str, TensorSpec]:
        checkpoint = self._checkpoint
        channels = checkpoint.latent_channels
        if checkpoint.expand_timesteps:
            _, _, _, height, width = self._latent_shape(channels)
            return {
                CONDITION: TensorSpec((1, channels, 1, height, width), "fp32"),
                FIRST_FRAME_MASK: TensorSpec(self._latent_shape(1), "fp32"),
            }
        # A mask for each of the frames of a latent frame, and the image's latents.
        channels += checkpoint.vae_scale_factor_temporal
        specs = {CONDITION: TensorSpec(self._latent_shape(channels), "fp32")}
        if checkpoint.image_embeds is not None:
            specs[IMAGE_EMBEDS] = TensorSpec((1, *checkpoint.image_embeds), "fp32")
        return specs

    def _latent_shape(self, channels: int) -> tuple[int, ...]:
        return self._checkpoint.latent_shape(self._sampling, channels)

    def _scheduler(self) -> SchedulerConfig:
        return scheduler_config(self._checkpoint, self._sampling)

    def _arguments(self) -> dict[str, Any]:
        return sampling_arguments(self._sampling)

    def _encode(self, arguments: Mapping[str, Any], scheduler: Any) -> Tensors:
        prompts: list[Any] = []
        latents: list[Any] = []
        images: list[Any] = []
        methods = {
            "encode_prompt": recorder(self._pipe.encode_prompt, prompts),
            "prepare_latents": recorder(self._pipe.prepare_latents, latents),
        }
        if self._parts.has_image:
            methods["encode_image"] = recorder(self._pipe.encode_image, images)
        with replaced(self._pipe, **methods):
            call_range(self._pipe, scheduler, arguments)
        tensors: Tensors = dict(
            zip((PROMPT_EMBEDS, NEGATIVE_PROMPT_EMBEDS), prompts[0], strict=True)
        )
        # The result of the call is another latent where the image replaces the first frame.
        made = latents[0] if self._parts.has_image else (latents[0],)
        tensors |= dict(zip((LATENTS, CONDITION, FIRST_FRAME_MASK), made, strict=False))
        return tensors | dict(zip((IMAGE_EMBEDS,), images, strict=False))

    def _inputs(self, tensors: Tensors) -> dict[str, Any]:
        # The pipeline requires an image, but only methods that are replaced read it.
        image = {"image": torch.empty(0)} if self._parts.has_image else {}
        return {
            LATENTS: tensors[LATENTS],
            PROMPT_EMBEDS: tensors[PROMPT_EMBEDS],
            NEGATIVE_PROMPT_EMBEDS: tensors.get(NEGATIVE_PROMPT_EMBEDS),
            **image,
        }

    def _replacements(self, tensors: Tensors) -> dict[str, Any]:
        if not self._parts.has_image:
            return {}
        names = (LATENTS, CONDITION, FIRST_FRAME_MASK)
        made = tuple(tensors[name] for name in names if name in tensors)
        return {
            "prepare_latents": lambda *_: made,
            "encode_image": lambda *_: tensors[IMAGE_EMBEDS],
        }


def load_wan(
    checkpoint: WanCheckpoint,
    model: ModelConfig,
    sampling: WanSampling,
    device: str,
    roles: Roles,
) -> WanModel:
    """Loads only the components for one rank; see `load_parts` for errors."""
    parts = load_parts(
        checkpoint,
        has_image=sampling.from_image,
        roles=roles,
        dtype=model.dtype,
        device=device,
    )
    return WanModel(checkpoint, parts, sampling)


def sampling_arguments(sampling: WanSampling) -> dict[str, Any]:
    """Arguments of `__call__` that only depend on the sampling parameters."""
    return {
        "height": sampling.height,
        "width": sampling.width,
        "num_frames": sampling.num_frames,
        "num_inference_steps": sampling.num_inference_steps,
        "guidance_scale": sampling.guidance_scale,
        "guidance_scale_2": sampling.guidance_scale_2,
        "max_sequence_length": sampling.max_sequence_length,
    }
