"""Random checkpoints of SVD-XT's own size, made from its configuration: no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModelWithProjection

from svdpp.config import ModelConfig
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine.load import silence_libraries
from tests.models.builders import save_tiny_checkpoint, svd_scheduler


def save_checkpoint(folder: Path, *, full_size: bool) -> Path:
    """Saves a random checkpoint under `folder` in fp16 (tiny: fp32), and returns the folder."""
    if not full_size:
        return save_tiny_checkpoint(folder)
    silence_libraries()
    published = find_checkpoint(ModelConfig(), weights=False).folder
    kinds: dict[str, Any] = {
        "unet": diffusers.UNetSpatioTemporalConditionModel,
        "vae": diffusers.AutoencoderKLTemporalDecoder,
    }
    torch.manual_seed(0)
    with torch.device("cuda:0"):
        parts = {
            name: kind.from_config(kind.load_config(published / name))
            for name, kind in kinds.items()
        }
        config = CLIPVisionConfig.from_pretrained(published / "image_encoder")
        parts["image_encoder"] = CLIPVisionModelWithProjection(config)
    pipeline = diffusers.StableVideoDiffusionPipeline(
        **{name: part.half().cpu() for name, part in parts.items()},
        scheduler=svd_scheduler(),
        feature_extractor=CLIPImageProcessorPil(),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder
