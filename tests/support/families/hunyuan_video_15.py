"""Tiny HunyuanVideo-1.5 checkpoints and their test cases."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler

from tests.support.family_case import Case, size
from tests.support.tiny_parts import (
    DENOISER,
    TEXT,
    Parts,
    qwen,
    qwen_tokenizer,
    siglip,
    t5_sizes,
)


def _hunyuan_video_15(image: bool) -> Parts:
    template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    parts = {
        "tokenizer": qwen_tokenizer(chat_template=template),
        "text_encoder": transformers.Qwen2_5_VLTextModel(qwen()),
        "tokenizer_2": transformers.ByT5Tokenizer(),
        "text_encoder_2": transformers.T5EncoderModel(
            transformers.T5Config(**{**t5_sizes(1), "vocab_size": 384})
        ),
        "vae": diffusers.AutoencoderKLHunyuanVideo15(
            **{"latent_channels": 4, "block_out_channels": (16, 16), "layers_per_block": 1},
            **{"spatial_compression_ratio": 4, "temporal_compression_ratio": 2},
            **{"downsample_match_channel": False, "upsample_match_channel": False},
        ),
        "transformer": diffusers.HunyuanVideo15Transformer3DModel(
            **{**DENOISER, "in_channels": 9, "attention_head_dim": 8, "num_refiner_layers": 1},
            **{"mlp_ratio": 2.0, "text_embed_dim": TEXT, "text_embed_2_dim": TEXT},
            **{"image_embed_dim": 12, "rope_axes_dim": (2, 2, 4), "target_size": 16},
        ),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=1.0),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
    }
    return {**parts, **siglip()} if image else parts


def _modular(image: bool, guider: Any = None) -> Parts:
    parts = _hunyuan_video_15(image)
    del parts["guider"]  # without a guider in the checkpoint, diffusers creates one
    return parts if guider is None else {**parts, "guider": guider}


PARTS = {"hunyuan_video_15": _hunyuan_video_15, "hunyuan_video_15_modular": _modular}
CASES = {
    "hunyuan-video-1.5-image": Case(
        "hunyuan_video_15",
        size(16, 16, 9),
        image=True,
        refused=[({"height": 16, "width": 48}, "no clips of `height` 16 `width` 48")],
    ),
    "hunyuan-video-1.5": Case("hunyuan_video_15", size(16, 16, 9)),
    "hunyuan-video-1.5-modular": Case(
        "hunyuan_video_15_modular",
        size(16, 16, 9),
        refused=[({"guidance_scale": 1.0}, "`guidance_scale` must be above 1, got 1.0")],
    ),
    "hunyuan-video-1.5-modular-mixed": Case(
        "hunyuan_video_15_modular",
        size(16, 16, 9),
        changes={
            "guider": diffusers.AdaptiveProjectedMixGuidance(
                adaptive_projected_guidance_start_step=1
            )
        },
    ),
    "hunyuan-video-1.5-modular-image": Case(
        "hunyuan_video_15_modular", size(16, 32, 9), image=True
    ),
}
