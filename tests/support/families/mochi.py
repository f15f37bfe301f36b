"""Tiny Mochi checkpoint and its test cases."""

from __future__ import annotations

import diffusers
from diffusers import FlowMatchEulerDiscreteScheduler

from tests.support.family_case import Case, size
from tests.support.tiny_parts import TEXT, Parts, t5


def _mochi(_: bool) -> Parts:
    return {
        **t5(),
        "vae": diffusers.AutoencoderKLMochi(
            **{f"{half}_block_out_channels": (32,) * 4 for half in ("encoder", "decoder")},
            layers_per_block=(1,) * 5,
        ),
        "transformer": diffusers.MochiTransformer3DModel(
            **{"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2},
            **{"pooled_projection_dim": 16, "text_embed_dim": TEXT, "time_embed_dim": 4},
            max_sequence_length=8,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }


PARTS = {"mochi": _mochi}
CASES = {"mochi": Case("mochi", size(16, 16, 7))}
