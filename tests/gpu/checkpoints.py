"""Random checkpoints of SVD-XT's own size, made from its configuration: no download."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLTemporalDecoder,
    EulerDiscreteScheduler,
    UNetSpatioTemporalConditionModel,
)
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModelWithProjection

from svdpp.models.engine.load import silence_libraries
from tests.models.builders import SVD_SCHEDULER, save_tiny_checkpoint


def save_checkpoint(folder: Path, *, full_size: bool) -> Path:
    """Saves a random checkpoint under `folder` in fp16 (tiny: fp32), and returns the folder.

    SVD-XT's UNet has 1.52 G parameters, which are diffusers' defaults but for the frames; its VAE
    and image encoder are those of
    https://huggingface.co/stabilityai/stable-video-diffusion-img2vid-xt (config.json of each).
    """
    if not full_size:
        return save_tiny_checkpoint(folder)
    silence_libraries()
    from diffusers import StableVideoDiffusionPipeline  # it warns of torchvision on import

    torch.manual_seed(0)
    with torch.device("cuda:0"):
        parts = {
            "unet": UNetSpatioTemporalConditionModel(num_frames=25),
            "vae": AutoencoderKLTemporalDecoder(
                down_block_types=("DownEncoderBlock2D",) * 4,
                block_out_channels=(128, 256, 512, 512),
                layers_per_block=2,
                latent_channels=4,
                sample_size=768,
            ),
            "image_encoder": CLIPVisionModelWithProjection(
                CLIPVisionConfig(
                    hidden_size=1280,
                    intermediate_size=5120,
                    num_hidden_layers=32,
                    num_attention_heads=16,
                    patch_size=14,
                    projection_dim=1024,
                    hidden_act="gelu",
                )
            ),
        }
    pipeline = StableVideoDiffusionPipeline(
        **{name: part.half().cpu() for name, part in parts.items()},
        scheduler=EulerDiscreteScheduler(**SVD_SCHEDULER),
        feature_extractor=CLIPImageProcessorPil(),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder
