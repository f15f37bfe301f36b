"""A tiny Helios."""

from __future__ import annotations

import diffusers

from tests.support.families.wan import wan_vae
from tests.support.family_case import Case, size
from tests.support.tiny_parts import TEXT, Parts, t5


def _helios(_: bool) -> Parts:
    return {
        **t5(kind="UMT5"),
        "vae": wan_vae(16),
        "transformer": diffusers.HeliosTransformer3DModel(
            **{"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1},
            **{"in_channels": 16, "out_channels": 16, "text_dim": TEXT, "freq_dim": 16},
            **{"patch_size": (1, 2, 2), "ffn_dim": 32, "rope_dim": (4, 4, 4)},
        ),
        "scheduler": diffusers.HeliosScheduler(
            stage_range=[0, 1], stages=1, use_dynamic_shifting=True
        ),
    }


_UNREAD = {"lower_order_nums": "the second step of a chunk of two is its last, of order 1"}

PARTS = {"helios": _helios}
CASES = {
    "helios": Case(
        "helios",
        size(16, 16, 65, num_inference_steps=4),
        negative="blurred",
        draws=True,
        unread=_UNREAD,
        refused=[
            ({"num_frames": 66}, "whole chunks, got 66 ... 33 or 65 or 97"),
            ({"num_inference_steps": 5}, "multiple of 2, got 5"),
        ],
    ),
    "helios-image": Case(
        "helios", size(16, 16, 65, num_inference_steps=4), image=True, draws=True, unread=_UNREAD
    ),
}
