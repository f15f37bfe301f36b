"""The estimate of SVD's memory: its parts, run with the code of a rank on fake tensors."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch

from svdpp.config import ModelConfig, SvdSampling
from svdpp.models.loading import new_module
from svdpp.models.memory import FakeRun, MemoryEstimate, PartMemory, num_bytes
from svdpp.models.svd import load
from svdpp.models.svd.checkpoint import SvdCheckpoint
from svdpp.models.svd.denoise import SvdDenoiser
from svdpp.models.svd.encode import ADDED_TIME_IDS, IMAGE_EMBEDDING, IMAGE_LATENTS


def estimate_parts(
    fake_run: FakeRun, checkpoint: SvdCheckpoint, model: ModelConfig, sampling: SvdSampling
) -> MemoryEstimate:
    """The memory of SVD's parts; see `models.memory.estimate`."""
    return MemoryEstimate(
        encode=_encode(fake_run, checkpoint, sampling),
        denoise=_denoise(fake_run, checkpoint, model, sampling),
        decode=_decode(fake_run, checkpoint, sampling),
    )


def _encode(fake_run: FakeRun, checkpoint: SvdCheckpoint, sampling: SvdSampling) -> PartMemory:
    """CLIP at its fixed 224 x 224, then the VAE's encoder at the clip's size."""
    clip = _module(fake_run, "image_encoder", checkpoint)
    clip_pixels = torch.zeros(1, 3, 224, 224, dtype=fake_run.dtype)
    embedding = fake_run.measure([clip], lambda: clip(clip_pixels))
    vae = _module(fake_run, "vae", checkpoint, ("decoder",))
    weight_bytes = num_bytes([vae])
    upcast = fake_run.dtype == torch.float16 and bool(vae.config.force_upcast)
    if upcast:  # as in `encode_image`
        vae = _module(fake_run, "vae", checkpoint, ("decoder",), torch.float32)
    pipe = _pipe(vae)
    pixels = torch.zeros(1, 3, sampling.height, sampling.width)
    encoded = fake_run.measure(
        [vae], lambda: pipe._encode_vae_image(pixels, torch.device("cpu"), 1, False)
    )
    return PartMemory(
        embedding.weight_bytes + weight_bytes,
        max(embedding.activation_bytes, encoded.peak_bytes - weight_bytes),
        embedding.flops + encoded.flops,
    )


def _denoise(
    fake_run: FakeRun, checkpoint: SvdCheckpoint, model: ModelConfig, sampling: SvdSampling
) -> PartMemory:
    unet = _module(fake_run, "unet", checkpoint)
    if model.memory_opt:
        unet.enable_forward_chunking()
    channels, size = checkpoint.latent_channels, _latent_size(checkpoint, sampling)
    tensors = {
        IMAGE_LATENTS: torch.zeros(1, channels, *size, dtype=fake_run.dtype),
        IMAGE_EMBEDDING: torch.zeros(1, 1, checkpoint.cross_attention_dim, dtype=fake_run.dtype),
        ADDED_TIME_IDS: torch.zeros(1, 3, dtype=fake_run.dtype),
    }
    latent = torch.zeros(1, sampling.frames, channels, *size, dtype=fake_run.dtype)
    denoiser = SvdDenoiser(unet, load.new_scheduler(checkpoint), tensors, sampling, 0)
    return fake_run.measure([unet], lambda: denoiser.predict_noise(latent, 0))


def _decode(fake_run: FakeRun, checkpoint: SvdCheckpoint, sampling: SvdSampling) -> PartMemory:
    vae = _module(fake_run, "vae", checkpoint, ("encoder", "quant_conv"))
    pipe = _pipe(vae)
    channels, size = checkpoint.latent_channels, _latent_size(checkpoint, sampling)
    frames = sampling.frames
    chunk = sampling.decode_chunk_size or frames

    def decode(num_frames: int) -> PartMemory:
        latent = torch.zeros(1, num_frames, channels, *size, dtype=fake_run.dtype)
        return fake_run.measure([vae], lambda: pipe.decode_latents(latent, num_frames, chunk))

    num_whole = frames // chunk
    if num_whole < 3:
        return decode(frames)
    # Equal chunks have equal FLOPs, and take equal memory above the frames that are decoded before
    # them. So one is counted for all but the last, which is run with what follows it.
    one = decode(chunk)
    _skip_decodes(vae, num_whole - 1, checkpoint.vae_scale_factor)
    rest = decode(frames)
    return rest._replace(flops=rest.flops + (num_whole - 1) * one.flops)


def _skip_decodes(vae: Any, number: int, factor: int) -> None:
    """Makes the next decodes of a VAE return frames of the right size without computing them."""
    original, calls = vae.decode, itertools.count()

    def decode(latent: torch.Tensor, **options: Any) -> Any:
        if next(calls) >= number:
            return original(latent, **options)
        height, width = (factor * side for side in latent.shape[-2:])
        frames = latent.new_empty(len(latent), vae.config.out_channels, height, width)
        return SimpleNamespace(sample=frames)

    vae.decode = decode


def _pipe(vae: Any) -> Any:
    """A pipeline with diffusers' methods to encode and decode with a VAE."""
    from diffusers import StableVideoDiffusionPipeline  # its import warns if torchvision is missing

    return StableVideoDiffusionPipeline(
        vae=vae, image_encoder=None, unet=None, scheduler=None, feature_extractor=None
    )


def _latent_size(checkpoint: SvdCheckpoint, sampling: SvdSampling) -> tuple[int, int]:
    factor = checkpoint.vae_scale_factor
    return sampling.height // factor, sampling.width // factor


def _module(
    fake_run: FakeRun,
    component: str,
    checkpoint: SvdCheckpoint,
    without: tuple[str, ...] = (),
    dtype: torch.dtype | None = None,
) -> Any:
    """One component, without some submodules, as `load` does."""
    folder = checkpoint.folder / component
    return fake_run.module(lambda: new_module(load.CLASSES[component], folder), without, dtype)
