"""Tiny SVD checkpoint and its test cases."""

from __future__ import annotations

import diffusers
import transformers

from svdpp.config import ModelConfig
from svdpp.models.checkpoint import find_checkpoint
from tests.support.family_case import Case, size
from tests.support.tiny_parts import Parts


def _svd(_: bool, *, vae_factor: int = 8, num_frames: int = 4) -> Parts:
    """Return the components of a tiny SVD. `vae_factor` is the VAE's scale factor: 8, 4 or 2."""
    num_blocks = {8: 4, 4: 3, 2: 2}[vae_factor]
    vision = {"hidden_size": 16, "intermediate_size": 16, "projection_dim": 16}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 56}
    return {
        "vae": diffusers.AutoencoderKLTemporalDecoder(
            down_block_types=("DownEncoderBlock2D",) * num_blocks,
            block_out_channels=(32,) * num_blocks,  # at least 32, for the 32 groups of GroupNorm
        ),
        "image_encoder": transformers.CLIPVisionModelWithProjection(
            transformers.CLIPVisionConfig(**vision, **layers)
        ),
        "unet": diffusers.UNetSpatioTemporalConditionModel(
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            **{"sample_size": 8, "num_frames": num_frames, "layers_per_block": 1},
            **{"block_out_channels": (32, 32), "num_attention_heads": (2, 2)},
            **{"addition_time_embed_dim": 32, "projection_class_embeddings_input_dim": 96},
            cross_attention_dim=16,
        ),
        "scheduler": svd_scheduler(),
        "feature_extractor": transformers.CLIPImageProcessorPil(),
    }


def svd_scheduler() -> diffusers.EulerDiscreteScheduler:
    """Return the scheduler of the published SVD (stabilityai/stable-video-diffusion-img2vid-xt)."""
    published = find_checkpoint(ModelConfig(), weights=False).folder
    return diffusers.EulerDiscreteScheduler.from_pretrained(published, subfolder="scheduler")


PARTS = {"svd": _svd}
CASES = {"svd": Case("svd", size(64, 64, 4), image=True)}
