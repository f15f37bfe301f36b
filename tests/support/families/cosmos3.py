"""Tiny Cosmos 3."""

from __future__ import annotations

import diffusers

from tests.support.families.wan import WAN_UNIPC, wan_vae
from tests.support.family_case import Case, size
from tests.support.tiny_parts import Parts, qwen_tokenizer

_TEMPLATE = "{% for each in messages %}{{ each.content }}{% endfor %}"
_SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]


def _cosmos3(_: bool) -> Parts:
    return {
        "text_tokenizer": qwen_tokenizer(
            chat_template=_TEMPLATE, additional_special_tokens=_SPECIAL
        ),
        "vae": wan_vae(16),
        "scheduler": diffusers.UniPCMultistepScheduler(**WAN_UNIPC),
        "transformer": diffusers.Cosmos3OmniTransformer(
            **{"head_dim": 6, "hidden_act": "relu2", "hidden_size": 12, "intermediate_size": 12},
            **{"latent_channel": 16, "latent_patch_size": 1, "patch_latent_dim": 16},
            **{"num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 1},
            **{"qk_norm_for_text": False, "rms_norm_eps": 1e-5, "rope_axes_dim": [1, 1, 1]},
            vocab_size=512,
        ),
        "enable_safety_checker": False,
    }


_BLOCK = "block.denoiser_input_fields."
_UNREAD = {
    **dict.fromkeys(
        (
            "block.cond_vision_segment.vision_mrope_ids",
            f"{_BLOCK}uncond_vision_segment.vision_mrope_ids",
            f"{_BLOCK}cond_text_segment.text_mrope_ids",
            f"{_BLOCK}uncond_text_segment.text_mrope_ids",
        ),
        "the position ids, which travel, too, are made of these",
    ),
    "block.vision_tokens.0": "a list, which each iteration makes again",
}

PARTS = {"cosmos3": _cosmos3}
CASES = {
    "cosmos3": Case("cosmos3", size(32, 32, 5), negative="blurred", unread=_UNREAD),
    "cosmos3-image": Case(
        "cosmos3",
        size(32, 32, 5),
        image=True,
        unread=_UNREAD,
        refused=[({"num_frames": 1}, "a clip from an image needs more than 1 `num_frames`")],
    ),
    "cosmos3-video": Case(
        "cosmos3_v2v",
        size(32, 32, 9),
        image=True,
        unread=_UNREAD,
        refused=[
            ({"video_frames": 6}, "`video_frames` must be a multiple of 4 plus 1, got 6"),
            ({"num_frames": 5}, "needs more than 5 `num_frames`, got 5"),
        ],
    ),
}
