"""Owns the estimate of LTX-Video's memory: its parts, run on fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLLTXVideo, LTXVideoTransformer3DModel
from transformers import T5EncoderModel

from svdpp.config import LtxSampling, ModelConfig
from svdpp.models.loading import new_module
from svdpp.models.ltx.checkpoint import LtxCheckpoint
from svdpp.models.memory import FakeRun, MemoryEstimate, PartMemory, joined


def estimate_parts(
    fake_run: FakeRun,
    checkpoint: LtxCheckpoint,
    model: ModelConfig,  # noqa: ARG001
    sampling: LtxSampling,
) -> MemoryEstimate:
    """The memory of LTX-Video's parts; see `models.memory.estimate`."""
    return MemoryEstimate(
        encode=_encode(fake_run, checkpoint, sampling),
        denoise=_denoise(fake_run, checkpoint, sampling),
        decode=_decode(fake_run, checkpoint, sampling),
    )


def _encode(fake_run: FakeRun, checkpoint: LtxCheckpoint, sampling: LtxSampling) -> PartMemory:
    """The text encoder, and for clips from photographs the VAE's encoder."""
    folder = checkpoint.folder / "text_encoder"
    text = fake_run.module(lambda: new_module(T5EncoderModel, folder))
    tokens = torch.zeros(1, sampling.max_sequence_length, dtype=torch.int64)
    parts = [fake_run.measure([text], lambda: text(tokens, torch.ones_like(tokens)))]
    if sampling.from_image:
        vae = _vae(fake_run, checkpoint, without=("decoder",))
        pixels = torch.zeros(1, 3, 1, sampling.height, sampling.width, dtype=fake_run.dtype)
        parts.append(fake_run.measure([vae], lambda: vae.encode(pixels)))
    return joined(parts)


def _denoise(fake_run: FakeRun, checkpoint: LtxCheckpoint, sampling: LtxSampling) -> PartMemory:
    folder = checkpoint.folder / "transformer"
    transformer = fake_run.module(lambda: new_module(LTXVideoTransformer3DModel, folder))
    batch, length = 1 + sampling.guided, sampling.max_sequence_length
    frames, height, width = checkpoint.latent_size(sampling)
    tokens = frames * height * width
    inputs: dict[str, Any] = {
        "hidden_states": torch.zeros(
            batch, tokens, checkpoint.latent_channels, dtype=fake_run.dtype
        ),
        "encoder_hidden_states": torch.zeros(
            batch, length, checkpoint.text_dim, dtype=fake_run.dtype
        ),
        # One for each token if the first frame is given.
        "timestep": torch.zeros((batch, tokens) if sampling.from_image else batch),
        "encoder_attention_mask": torch.ones(batch, length, dtype=torch.bool),
    }
    sizes = {"num_frames": frames, "height": height, "width": width}
    return fake_run.measure([transformer], lambda: transformer(**inputs, **sizes))


def _decode(fake_run: FakeRun, checkpoint: LtxCheckpoint, sampling: LtxSampling) -> PartMemory:
    vae = _vae(fake_run, checkpoint, without=("encoder",))
    shape = (1, checkpoint.latent_channels, *checkpoint.latent_size(sampling))
    latent = torch.zeros(shape, dtype=fake_run.dtype)
    timestep = torch.zeros(1, dtype=fake_run.dtype) if checkpoint.timestep_conditioning else None
    return fake_run.measure([vae], lambda: vae.decode(latent, timestep))


def _vae(fake_run: FakeRun, checkpoint: LtxCheckpoint, without: tuple[str, ...]) -> Any:
    folder = checkpoint.folder / "vae"
    return fake_run.module(lambda: new_module(AutoencoderKLLTXVideo, folder), without)
