"""Tiny MiniMax-H3 checkpoints and their test cases."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from svdpp.models.engine.load import without_videos
from tests.support.family_case import Case, size
from tests.support.tiny_parts import Parts, qwen_tokenizer

_SIZE = size(32, 32, 124, max_sequence_length=4096)
_SPECIAL = {
    **{"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
    **{"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"},
}


def _minimax_h3(_: bool) -> Parts:
    tokenizer = qwen_tokenizer(additional_special_tokens=[*_SPECIAL.values()])
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _SPECIAL.items()}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    text: dict[str, Any] = {
        **{"vocab_size": 80, "hidden_size": 8, "intermediate_size": 8, **heads},
        **{"num_hidden_layers": 51},  # the pipeline reads the output of the 50th layer
        **{"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
    }
    vision = {
        **{"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2},
        **{"patch_size": 4, "out_hidden_size": 8, "num_position_embeddings": 16},
        **{"deepstack_visual_indexes": []},
    }
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    return {
        "tokenizer": tokenizer,
        "processor": _processor(tokenizer),
        "text_encoder": transformers.Qwen3VLForConditionalGeneration(config),
        "transformer": diffusers.MiniMaxH3Transformer3DModel(
            **{"num_attention_heads": 2, "attention_head_dim": 16, "hidden_size": 24},
            **{"num_layers": 2, "num_refiner_layers": 2, "ffn_dim": 32, "text_dim": 8},
            **{"in_channels": 4, "audio_in_channels": 8, "patch_size": (1, 2, 2)},
            **{"freq_dim": 8, "time_embed_hidden_dim": 24, "time_embed_dim": 16},
            **{"rope_freq_dim": 2},
        ),
        "scheduler": diffusers.MiniMaxH3Scheduler(12.0),
        "audio_scheduler": diffusers.MiniMaxH3Scheduler(3.0),
        "vae": diffusers.AutoencoderKLMiniMaxH3(
            **{"latent_channels": 4, "block_out_channels": (8, 16, 16, 16)},
            **{"layers_per_block": 1, "spatial_downsample_factors": (2, 2, 2, 2)},
            **{"temporal_downsample_factors": (1, 2, 2, 1), "norm_num_groups": 8},
            **{"decoder_num_layers": 1, "decoder_num_attention_heads": 2},
            **{"decoder_attention_head_dim": 8, "decoder_num_register_tokens": 2},
            **{"decoder_ffn_mult": 2, "latents_mean": (0.1,) * 4, "latents_std": (1.1,) * 4},
        ),
        "audio_vae": diffusers.AutoencoderKLMiniMaxH3Audio(
            **{"encoder_dim": 4, "encoder_rates": (2, 2), "latent_dim": 32},
            **{"latent_channels": 8, "num_attention_heads": 2, "decoder_dim": 16},
            **{"decoder_rates": (2, 2), "decoder_kernel_sizes": (4, 4)},
            **{"resblock_kernel_sizes": (3, 7), "resblock_dilation_sizes": ((1, 3), (1, 3))},
            **{"sampling_rate": 32000, "latents_mean": [0.0] * 8, "latents_std": [1.0] * 8},
        ),
    }


def _processor(tokenizer: Any) -> Any:
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 256}
    )
    return without_videos(transformers.Qwen3VLProcessor)(images, tokenizer)


def _minimax_h3_references(_: bool) -> Parts:
    parts = _minimax_h3(True)
    # The config sets the short edge to which reference images are scaled, because the default of
    # 2048 pixels would be slow.
    return {**parts, "transformer_ref": parts.pop("transformer"), "reference_image_short_edge": 64}


PARTS = {"minimax_h3": _minimax_h3, "minimax_h3_references": _minimax_h3_references}
_UNREAD = {
    "latents": "steps read the rows of images and of the latent together",
    **dict.fromkeys(
        ("block.row_timestep_plan.0.0", "block.row_timestep_plan.0.1"),
        "the list has timesteps of all steps, and only the first step reads these",
    ),
}
CASES = {
    "minimax-h3": Case(
        "minimax_h3",
        _SIZE,
        unread=_UNREAD,
        refused=[
            ({"num_frames": 107}, "`num_frames` must be 124 to 345, which are 5 to 15 seconds"),
            ({"fps": 25}, "`fps` must be 24, got 25"),
            ({"guidance_scale": 2.0}, "`guidance_scale` must be 1.0, got 2.0"),
            ({"max_sequence_length": 64}, "`max_sequence_length` must be 4096, got 64"),
        ],
    ),
    "minimax-h3-image": Case("minimax_h3", _SIZE, image=True, unread=_UNREAD),
    "minimax-h3-last-image": Case("minimax_h3", _SIZE, image=True, last_image=True, unread=_UNREAD),
    "minimax-h3-references": Case(
        "minimax_h3_references", _SIZE, image=True, num_references=2, unread=_UNREAD
    ),
    "minimax-h3-one-reference": Case("minimax_h3_references", _SIZE, image=True, unread=_UNREAD),
}
