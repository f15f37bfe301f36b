"""Owns small random checkpoints of SVD's classes, for tests that read or run one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from peft import LoraConfig, get_peft_model_state_dict
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModelWithProjection

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling, sampling_defaults
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine.load import silence_libraries


def save_tiny_checkpoint(
    folder: Path,
    *,
    vae_factor: int = 8,
    num_frames: int = 4,
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
            image_encoder=_image_encoder(),
            unet=_unet(num_frames),
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


def _unet(num_frames: int) -> diffusers.UNetSpatioTemporalConditionModel:
    return diffusers.UNetSpatioTemporalConditionModel(
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        **{"sample_size": 8, "num_frames": num_frames, "layers_per_block": 1},
        **{"block_out_channels": (32, 32), "num_attention_heads": (2, 2)},
        **{"addition_time_embed_dim": 32, "projection_class_embeddings_input_dim": 96},
        cross_attention_dim=16,
    )


def _image_encoder() -> CLIPVisionModelWithProjection:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "projection_dim": 16}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 56}
    return CLIPVisionModelWithProjection(CLIPVisionConfig(**sizes, **layers))


def small_svd(world_size: int, *, steps: int = 6, **changes: Any) -> PipelineConfig:
    """The demo model over `world_size` ranks, with two frames of 64 x 64."""
    values = {**sampling_defaults("demo"), "height": 64, "width": 64, "num_frames": 2}
    return PipelineConfig(
        world_size=world_size,
        model=ModelConfig(name="demo"),
        sampling=SvdSampling(num_inference_steps=steps, **values),
        **changes,
    )


def save_tiny_lora(checkpoint: Path, file: Path, *, part: str = "transformer", seed: int) -> Path:
    """Saves a LoRA of one denoiser of `checkpoint` as `file`, and returns its path."""
    index = json.loads((checkpoint / "model_index.json").read_text())
    model = getattr(diffusers, index[part][1]).from_pretrained(checkpoint / part)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=targets))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros, before training
                torch.nn.init.normal_(parameter)
    getattr(diffusers, index["_class_name"]).save_lora_weights(
        file.parent,
        transformer_lora_layers=get_peft_model_state_dict(model),
        weight_name=file.name,
        transformer_lora_adapter_metadata=model.peft_config["default"].to_dict(),
    )
    return file
