"""Owns LTX-Video's entry in the list of families; see `models.families.Family`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers import AutoencoderKLLTXVideo, LTXVideoTransformer3DModel
from transformers import T5EncoderModel

from svdpp.config import LtxSampling, ModelConfig
from svdpp.models.loading import check_components
from svdpp.models.ltx.checkpoint import LtxCheckpoint
from svdpp.models.ltx.load import load_reference as load_pipeline
from svdpp.models.ltx.model import generator_device, sampling_arguments
from svdpp.models.ltx.model import load_ltx as load_model
from svdpp.models.range_reference import RangeReference

__all__ = ["check_weights", "conditions", "load_model", "load_reference"]

_CLASSES: Mapping[str, Any] = {
    "transformer": LTXVideoTransformer3DModel,
    "vae": AutoencoderKLLTXVideo,
    "text_encoder": T5EncoderModel,
}


def load_reference(checkpoint: LtxCheckpoint, model: ModelConfig, device: str) -> RangeReference:
    """diffusers' pipeline for text, or for an image, by the sampling parameters of a clip."""

    def load(sampling: LtxSampling) -> Any:
        has_image = sampling.from_image
        return load_pipeline(checkpoint, has_image=has_image, dtype=model.dtype, device=device)

    def draws_on(sampling: LtxSampling) -> str:
        return generator_device(checkpoint, sampling.from_image, device)

    return RangeReference(load, sampling_arguments, draws_on)


def check_weights(checkpoint: LtxCheckpoint) -> int:
    """See `models.families.Family`."""
    return check_components(checkpoint, _CLASSES)


def conditions(checkpoint: LtxCheckpoint) -> dict[str, Any]:
    """Nothing: the bits depend on the request, the device and the libraries alone."""
    del checkpoint
    return {}
