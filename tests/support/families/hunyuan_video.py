"""Tiny HunyuanVideo checkpoints and their test cases."""

from __future__ import annotations

import diffusers
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler

from tests.support.family_case import Case, size
from tests.support.tiny_parts import (
    DENOISER,
    LLM,
    TEXT,
    Parts,
    clip_tokenizer,
    llama_tokenizer,
    vision,
)

#: Config values that make HunyuanVideo's denoisers tiny.
HUNYUAN = {
    **{**DENOISER, "attention_head_dim": 10, "num_single_layers": 1, "num_refiner_layers": 1},
    **{"text_embed_dim": TEXT, "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4)},
}


def hunyuan_video(image: bool) -> Parts:
    llama = transformers.LlamaConfig(**LLM, num_hidden_layers=3, pad_token_id=0)
    clip_sizes = {**LLM, "hidden_size": 8, "num_hidden_layers": 2}
    clip = transformers.CLIPTextConfig(**clip_sizes, pad_token_id=0, eos_token_id=2)
    parts = {
        "tokenizer": llama_tokenizer(),
        "text_encoder": transformers.LlamaModel(llama),
        "tokenizer_2": clip_tokenizer(),
        "text_encoder_2": transformers.CLIPTextModel(clip),
        "vae": diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=4
        ),
        "transformer": diffusers.HunyuanVideoTransformer3DModel(
            **HUNYUAN, patch_size=1, image_condition_type="token_replace" if image else None
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
    }
    if not image:
        return parts
    marks = ["<image>", "<|end_header_id|>"]
    parts["tokenizer"] = llama_tokenizer(additional_special_tokens=marks)
    llava = transformers.LlavaConfig(
        vision_config=vision(48, 2),  # (48 / 2) ** 2 patches, the 576 that the pipeline expects
        text_config=llama,
        image_token_index=parts["tokenizer"].convert_tokens_to_ids("<image>"),
        pad_token_id=0,
    )
    parts["text_encoder"] = transformers.LlavaForConditionalGeneration(llava)
    parts["image_processor"] = transformers.CLIPImageProcessorPil(crop_size=48, size=48)
    return parts


PARTS = {"hunyuan_video": hunyuan_video}
CASES = {
    "hunyuan-video": Case("hunyuan_video", size(16, 16, 9)),
    "hunyuan-video-image": Case(
        "hunyuan_video", size(16, 16, 9, max_sequence_length=420), image=True
    ),
}
