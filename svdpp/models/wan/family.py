"""Owns Wan's entry in the list of families; see `models.families.Family`."""

from __future__ import annotations

from typing import Any

import transformers
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import CLIPVisionModel

from svdpp.config import ModelConfig, WanSampling
from svdpp.models.loading import check_components
from svdpp.models.range_reference import RangeReference
from svdpp.models.wan.checkpoint import WanCheckpoint
from svdpp.models.wan.load import load_reference as load_pipeline
from svdpp.models.wan.model import load_wan as load_model
from svdpp.models.wan.model import sampling_arguments
from svdpp.models.wan.schedule import scheduler_config

__all__ = ["check_weights", "conditions", "load_model", "load_reference"]


def load_reference(checkpoint: WanCheckpoint, model: ModelConfig, device: str) -> RangeReference:
    """diffusers' pipeline for text, or for an image, by the sampling parameters of a clip."""

    def load(sampling: WanSampling) -> Any:
        scheduler = scheduler_config(checkpoint, sampling).values
        has_image = sampling.from_image
        return load_pipeline(
            checkpoint, scheduler, has_image=has_image, dtype=model.dtype, device=device
        )

    return RangeReference(load, sampling_arguments)


def check_weights(checkpoint: WanCheckpoint) -> int:
    """See `models.families.Family`."""
    return check_components(
        checkpoint,
        {
            "transformer": WanTransformer3DModel,
            "transformer_2": WanTransformer3DModel,
            "vae": AutoencoderKLWan,
            "image_encoder": CLIPVisionModel,
            "text_encoder": getattr(transformers, checkpoint.text_encoder_class),
        },
    )


def conditions(checkpoint: WanCheckpoint) -> dict[str, Any]:
    """Nothing: the bits depend on the request, the device and the libraries alone."""
    del checkpoint
    return {}
