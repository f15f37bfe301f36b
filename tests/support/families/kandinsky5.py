"""Tiny Kandinsky 5 checkpoints and their test cases."""

from __future__ import annotations

import diffusers
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler

from tests.support.families.hunyuan_video import hunyuan_video
from tests.support.family_case import Case, size
from tests.support.tiny_parts import TEXT, VISION, Parts, qwen, qwen_tokenizer

_SIZE = size(32, 32, 17, max_sequence_length=1024)


def qwen_vl() -> Parts:
    """Return HunyuanVideo's tiny components, with Kandinsky's Qwen as the first text encoder."""
    return {
        **hunyuan_video(image=False),
        "tokenizer": qwen_tokenizer(),
        "text_encoder": transformers.Qwen2_5_VLForConditionalGeneration(
            transformers.Qwen2_5_VLConfig(
                text_config=qwen().to_dict(),
                vision_config={
                    **{**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": TEXT},
                    **{"patch_size": 14, "fullatt_block_indexes": [0]},
                },
            )
        ),
    }


def _kandinsky5(image: bool) -> Parts:
    parts = {
        **qwen_vl(),
        "transformer": diffusers.Kandinsky5Transformer3DModel(
            **{"in_text_dim": TEXT, "in_text_dim2": 8, "time_dim": 8, "model_dim": 12},
            **{"ff_dim": 16, "num_text_blocks": 1, "num_visual_blocks": 1},
            **{"axes_dims": (2, 2, 2), "visual_cond": image},
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
    }
    with torch.no_grad():
        for weight in parts["transformer"].parameters():
            if not weight.any():  # with zero weights, the prompt would have no effect
                torch.nn.init.normal_(weight, std=0.1)
    return parts


PARTS = {"kandinsky5": _kandinsky5}
CASES = {
    "kandinsky5": Case("kandinsky5", _SIZE),
    "kandinsky5-image": Case(
        "kandinsky5",
        _SIZE,
        image=True,
        refused=[({"num_frames": 13}, "`num_frames` must be at least 17")],
    ),
}
