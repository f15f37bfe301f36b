"""Owns small random checkpoints of SVD's classes, for tests that read or run one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModelWithProjection

from svdpp.config import ModelConfig
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine.load import silence_libraries


def save_tiny_checkpoint(
    folder: Path,
    *,
    vae_factor: int = 8,
    num_frames: int = 4,
    embedding_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    variant: str | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """Saves a pipeline with random weights to `folder`, and returns the folder.

    `vae_factor` is 8, 4 or 2 pixels per latent cell; torch's global generator is not changed.
    """
    silence_libraries()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = diffusers.StableVideoDiffusionPipeline(
            vae=_vae({8: 4, 4: 3, 2: 2}[vae_factor]),
            image_encoder=_image_encoder(embedding_dim),
            unet=_unet(num_frames, embedding_dim),
            scheduler=svd_scheduler(),
            feature_extractor=CLIPImageProcessorPil(),
        )
    pipeline.to(dtype=dtype)
    pipeline.save_pretrained(
        folder, safe_serialization=True, variant=variant, max_shard_size=max_shard_size
    )
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON file; None removes the key."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: each for key, each in values.items() if each is not None}))


def svd_scheduler() -> diffusers.EulerDiscreteScheduler:
    """That of the published SVD (stabilityai/stable-video-diffusion-img2vid-xt)."""
    published = find_checkpoint(ModelConfig(), weights=False).folder
    return diffusers.EulerDiscreteScheduler.from_pretrained(published, subfolder="scheduler")


def _vae(num_blocks: int) -> diffusers.AutoencoderKLTemporalDecoder:
    return diffusers.AutoencoderKLTemporalDecoder(
        down_block_types=("DownEncoderBlock2D",) * num_blocks,
        block_out_channels=(32,) * num_blocks,  # GroupNorm has 32 groups
    )


def _unet(num_frames: int, embedding_dim: int) -> diffusers.UNetSpatioTemporalConditionModel:
    return diffusers.UNetSpatioTemporalConditionModel(
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        **{"sample_size": 8, "num_frames": num_frames, "layers_per_block": 1},
        **{"block_out_channels": (32, 32), "num_attention_heads": (2, 2)},
        **{"addition_time_embed_dim": 32, "projection_class_embeddings_input_dim": 96},
        cross_attention_dim=embedding_dim,
    )


def _image_encoder(embedding_dim: int) -> CLIPVisionModelWithProjection:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "projection_dim": embedding_dim}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 56}
    return CLIPVisionModelWithProjection(CLIPVisionConfig(**sizes, **layers))
