"""Owns loading LTX-Video's components for one rank, and the reference with all of them."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from diffusers import AutoencoderKLLTXVideo, LTXVideoTransformer3DModel
from transformers import T5EncoderModel

from svdpp.models.loading import ComponentLoader, library_errors, silence_libraries, torch_dtype
from svdpp.models.ltx.checkpoint import LtxCheckpoint
from svdpp.models.range_model import RangeParts
from svdpp.plan.layout import Roles


def load_parts(
    checkpoint: LtxCheckpoint,
    *,
    has_image: bool,
    roles: Roles,
    dtype: str,
    device: str,
) -> RangeParts:
    """Loads the components for a rank; also turns off the libraries' progress bars and warnings.

    Args:
        checkpoint: from `read_ltx`.
        has_image: whether clips are made from an image.
        roles: a rank that encodes needs tokenizer and text encoder and, for an image, the VAE's
            encoder; one that denoises, the transformer; one that decodes, the VAE's decoder.
        dtype: `fp32`, `fp16` or `bf16`, of all components.
        device: as torch spells it.

    Raises:
        ModelError: the weights do not fit the model's class, or a library rejects them.
        OutOfMemoryError: the device or the host has too little memory.
        RequestError: the device cannot be used.
    """
    silence_libraries()
    weights = torch_dtype(dtype)
    load = ComponentLoader(checkpoint, torch.device(device))
    parts: dict[str, Any] = {"tokenizer": None, "text_encoder": None}
    if roles.encode:
        tokenizer = getattr(transformers, checkpoint.tokenizer_class)
        parts["tokenizer"] = load.tokenizer(tokenizer)
        parts["text_encoder"] = load.module(T5EncoderModel, "text_encoder", weights)
    load_transformer = load.module if roles.denoise else load.configuration
    parts["transformer"] = load_transformer(LTXVideoTransformer3DModel, "transformer", weights)
    encode_image, decode = roles.encode and has_image, roles.decode
    if encode_image or decode:
        unused = () if encode_image and decode else ("encoder" if decode else "decoder",)
        parts["vae"] = load.module(AutoencoderKLLTXVideo, "vae", weights, unused)
    else:
        parts["vae"] = load.configuration(
            AutoencoderKLLTXVideo,
            "vae",
            weights,
            spatial_compression_ratio=checkpoint.vae_scale_factor_spatial,
            temporal_compression_ratio=checkpoint.vae_scale_factor_temporal,
        )
    with library_errors("scheduler"):
        config = dict(checkpoint.scheduler.values)
        parts["scheduler"] = getattr(diffusers, checkpoint.scheduler.name).from_config(config)
    pipe = pipeline_class(has_image)(**parts)
    return RangeParts(pipe=pipe, device=load.device, dtype=dtype, has_image=has_image)


def pipeline_class(has_image: bool) -> Any:
    """diffusers' pipeline for clips from an image, or from text alone."""
    return diffusers.LTXImageToVideoPipeline if has_image else diffusers.LTXPipeline


def load_reference(checkpoint: LtxCheckpoint, *, has_image: bool, dtype: str, device: str) -> Any:
    """The unmodified pipeline with all components, as a user loads it from the folder."""
    silence_libraries()
    with library_errors("the pipeline"):
        pipe = pipeline_class(has_image).from_pretrained(
            checkpoint.folder,
            dtype=torch_dtype(dtype),
            variant=checkpoint.variant,
            local_files_only=True,
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)
