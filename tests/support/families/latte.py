"""Tiny Latte checkpoint and its test cases."""

from __future__ import annotations

import diffusers

from tests.support.family_case import Case, size
from tests.support.tiny_parts import TEXT, Parts, t5


def _latte(_: bool) -> Parts:
    return {
        **t5(),
        "vae": diffusers.AutoencoderKL(
            **{"block_out_channels": (8, 8), "norm_num_groups": 4},
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        ),
        "transformer": diffusers.LatteTransformer3DModel(
            **{"sample_size": 8, "video_length": 2, "patch_size": 2, "attention_bias": True},
            **{"attention_head_dim": 8, "num_attention_heads": 3, "cross_attention_dim": 24},
            **{"caption_channels": TEXT, "in_channels": 4, "out_channels": 8},
            **{"activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000},
            **{"norm_type": "ada_norm_single", "norm_elementwise_affine": False},
        ),
        "scheduler": diffusers.DDIMScheduler(),
    }


PARTS = {"latte": _latte}
CASES = {"latte": Case("latte", size(16, 16, 2), is_stateless=True)}
