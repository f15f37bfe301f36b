"""Tiny Allegro checkpoint and its test cases."""

from __future__ import annotations

import diffusers

from tests.support.family_case import Case, size
from tests.support.tiny_parts import DENOISER, TEXT, Parts, t5


def _allegro(_: bool) -> Parts:
    return {
        **t5(),
        # 128 pixels is the smallest tile size at which tiles overlap in the same way as the
        # published VAE's tiles of 320 pixels.
        "vae": diffusers.AutoencoderKLAllegro(
            **{"block_out_channels": (2, 2, 2, 2), "layers_per_block": 1, "norm_num_groups": 2},
            **{"latent_channels": 4, "sample_size": 128},
        ),
        "transformer": diffusers.AllegroTransformer3DModel(
            **{**DENOISER, "attention_head_dim": 24, "cross_attention_dim": 48},
            **{"sample_height": 16, "sample_width": 16, "sample_frames": 6},
            **{"caption_channels": TEXT},
        ),
        "scheduler": diffusers.EulerAncestralDiscreteScheduler(),
    }


_BLACK = "the VAE decodes tiles of 128, and leaves the rest black"
PARTS = {"allegro": _allegro}
CASES = {
    "allegro": Case(
        "allegro",
        size(128, 128, 24),
        draws=True,
        refused=[
            ({"num_frames": 32}, "`num_frames` must be 24 plus a multiple of 16, got 32"),
            ({"num_frames": 8}, "`num_frames` must be 24 to 1024"),
            ({"height": 112}, f"`height` must be 128 plus a multiple of 8, got 112: {_BLACK}"),
            ({"width": 144}, f"{_BLACK} ... use `width` 128 or `width` 176"),
        ],
    )
}
