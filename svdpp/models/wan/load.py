"""Owns loading Wan's components for one rank, and the reference with all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
import torch
import transformers
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import CLIPVisionModel

from svdpp.models.loading import ComponentLoader, library_errors, silence_libraries, torch_dtype
from svdpp.models.range_model import RangeParts
from svdpp.models.wan.checkpoint import TRANSFORMERS, WanCheckpoint
from svdpp.plan.layout import Roles


def load_parts(
    checkpoint: WanCheckpoint,
    *,
    has_image: bool,
    roles: Roles,
    dtype: str,
    device: str,
) -> RangeParts:
    """Loads the components for a rank; also turns off the libraries' progress bars and warnings.

    Args:
        checkpoint: from `read_wan`.
        has_image: whether clips are made from an image.
        roles: a rank that encodes needs tokenizer and text encoder and, for an image, the VAE's
            encoder and CLIP; one that decodes, the VAE's decoder. Expert 0 is `transformer`, 1 is
            `transformer_2`, which runs the low-noise steps.
        dtype: `fp32`, `fp16` or `bf16`; VAE and CLIP are always in fp32.
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
        parts |= _text_parts(checkpoint, load, weights)
    if has_image:
        parts |= _image_parts(checkpoint, load, roles.encode)
    parts["vae"] = _vae(load, encode=roles.encode and has_image, decode=roles.decode)
    for expert, name in enumerate(TRANSFORMERS):
        wanted = expert in roles.experts
        parts[name] = load.module(WanTransformer3DModel, name, weights) if wanted else None
    if not roles.experts:
        parts["transformer"] = load.configuration(WanTransformer3DModel, "transformer", weights)
    with library_errors("scheduler"):
        parts["scheduler"] = _scheduler(checkpoint, checkpoint.scheduler.values)
    pipe = pipeline_class(has_image)(
        **parts,
        boundary_ratio=checkpoint.boundary_ratio,
        expand_timesteps=checkpoint.expand_timesteps,
    )
    return RangeParts(pipe=pipe, device=load.device, dtype=dtype, has_image=has_image)


def pipeline_class(has_image: bool) -> Any:
    """diffusers' pipeline for clips from an image, or from text alone."""
    return diffusers.WanImageToVideoPipeline if has_image else diffusers.WanPipeline


def load_reference(
    checkpoint: WanCheckpoint,
    scheduler_config: Mapping[str, Any],
    *,
    has_image: bool,
    dtype: str,
    device: str,
) -> Any:
    """The unmodified pipeline with all components, as a user loads it from the folder."""
    silence_libraries()
    fp32 = dict.fromkeys(checkpoint.fp32_components, torch.float32)
    dtypes = {"default": torch_dtype(dtype), **fp32}
    with library_errors("the pipeline"):
        pipe = pipeline_class(has_image).from_pretrained(
            checkpoint.folder, dtype=dtypes, variant=checkpoint.variant, local_files_only=True
        )
    pipe.scheduler = _scheduler(checkpoint, scheduler_config)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def _scheduler(checkpoint: WanCheckpoint, config: Mapping[str, Any]) -> Any:
    return getattr(diffusers, checkpoint.scheduler.name).from_config(dict(config))


def _text_parts(
    checkpoint: WanCheckpoint, load: ComponentLoader, dtype: torch.dtype
) -> dict[str, Any]:
    tokenizer = getattr(transformers, checkpoint.tokenizer_class)
    text_encoder = getattr(transformers, checkpoint.text_encoder_class)
    return {
        "tokenizer": load.tokenizer(tokenizer),
        "text_encoder": load.module(text_encoder, "text_encoder", dtype),
    }


def _image_parts(checkpoint: WanCheckpoint, load: ComponentLoader, encode: bool) -> dict[str, Any]:
    """CLIP of Wan 2.1; Wan 2.2 has none."""
    if not encode or checkpoint.image_processor_class is None:
        return {"image_encoder": None, "image_processor": None}
    processor = getattr(transformers, checkpoint.image_processor_class)
    return {
        "image_encoder": load.module(CLIPVisionModel, "image_encoder", torch.float32),
        "image_processor": load.processor(processor, "image_processor"),
    }


def _vae(load: ComponentLoader, *, encode: bool, decode: bool) -> Any:
    if not encode and not decode:
        return load.configuration(AutoencoderKLWan, "vae", torch.float32)
    unused: tuple[str, ...] = ()
    if not decode:
        unused = ("decoder", "post_quant_conv")
    elif not encode:
        unused = ("encoder", "quant_conv")
    return load.module(AutoencoderKLWan, "vae", torch.float32, unused)
