"""Owns the estimate of Wan's memory: its parts, run on fake tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import CLIPVisionModel

from svdpp.config import ModelConfig, WanSampling
from svdpp.models.loading import new_module
from svdpp.models.memory import FakeRun, MemoryEstimate, PartMemory, joined
from svdpp.models.wan.checkpoint import WanCheckpoint


def estimate_parts(
    fake_run: FakeRun,
    checkpoint: WanCheckpoint,
    model: ModelConfig,  # noqa: ARG001
    sampling: WanSampling,
) -> MemoryEstimate:
    """The memory of Wan's parts; see `models.memory.estimate`. VAE and CLIP are in float32."""
    return MemoryEstimate(
        encode=_encode(fake_run, checkpoint, sampling),
        denoise=_denoise(fake_run, checkpoint, sampling),
        decode=_decode(fake_run, checkpoint, sampling),
    )


def _encode(fake_run: FakeRun, checkpoint: WanCheckpoint, sampling: WanSampling) -> PartMemory:
    """The text encoder, and for clips from photographs CLIP and the VAE's encoder."""
    text_encoder = getattr(transformers, checkpoint.text_encoder_class)
    text = fake_run.module(lambda: new_module(text_encoder, checkpoint.folder / "text_encoder"))
    tokens = torch.zeros(1, sampling.max_sequence_length, dtype=torch.int64)
    parts = [fake_run.measure([text], lambda: text(tokens, torch.ones_like(tokens)))]
    if not sampling.from_image:
        return joined(parts)
    vae = _vae(fake_run, checkpoint, without=("decoder", "post_quant_conv"))
    # Otherwise the pipeline encodes the image and an empty picture for each further frame.
    num_frames = 1 if checkpoint.expand_timesteps else sampling.num_frames
    pixels = torch.zeros(1, 3, num_frames, sampling.height, sampling.width)
    parts.append(fake_run.measure([vae], lambda: vae.encode(pixels)))
    if checkpoint.image_embeds is not None:
        folder = checkpoint.folder / "image_encoder"
        clip = fake_run.module(lambda: new_module(CLIPVisionModel, folder), dtype=torch.float32)
        side = clip.config.image_size
        parts.append(
            fake_run.measure(
                [clip], lambda: clip(torch.zeros(1, 3, side, side), output_hidden_states=True)
            )
        )
    return joined(parts)


def _denoise(fake_run: FakeRun, checkpoint: WanCheckpoint, sampling: WanSampling) -> PartMemory:
    """One expert, for one forward pass; with guidance there are two, one after the other."""
    folder = checkpoint.folder / "transformer"
    transformer = fake_run.module(lambda: new_module(WanTransformer3DModel, folder))
    dtype = fake_run.dtype
    shape = checkpoint.latent_shape(sampling, transformer.config.in_channels)
    num_tokens = math.prod(shape[2:]) // math.prod(checkpoint.patch_size)
    inputs: dict[str, Any] = {
        "hidden_states": torch.zeros(shape, dtype=dtype),
        "timestep": torch.zeros((1, num_tokens) if checkpoint.expand_timesteps else 1),
        "encoder_hidden_states": torch.zeros(
            1, sampling.max_sequence_length, checkpoint.text_dim, dtype=dtype
        ),
    }
    if checkpoint.image_embeds is not None and sampling.from_image:
        inputs["encoder_hidden_states_image"] = torch.zeros(
            1, *checkpoint.image_embeds, dtype=dtype
        )
    one = fake_run.measure([transformer], lambda: transformer(**inputs))
    return one._replace(flops=one.flops * (1 + sampling.guided))


def _decode(fake_run: FakeRun, checkpoint: WanCheckpoint, sampling: WanSampling) -> PartMemory:
    vae = _vae(fake_run, checkpoint, without=("encoder", "quant_conv"))
    latent = torch.zeros(checkpoint.latent_shape(sampling, checkpoint.latent_channels))
    return fake_run.measure([vae], lambda: vae.decode(latent))


def _vae(fake_run: FakeRun, checkpoint: WanCheckpoint, without: tuple[str, ...]) -> Any:
    folder = checkpoint.folder / "vae"
    return fake_run.module(lambda: new_module(AutoencoderKLWan, folder), without, torch.float32)
