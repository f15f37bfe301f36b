"""Tiny SkyReels-V2, including the diffusion forcing pipelines."""

from __future__ import annotations

import diffusers
import transformers

from tests.support.families.wan import like_wan, wan_sizes
from tests.support.family_case import Case, size
from tests.support.tiny_parts import VISION_TOKENS, Parts, clip_vision


def _skyreels_v2(image: bool, *, two_images: bool = False) -> Parts:
    sizes = {**wan_sizes(1), "num_layers": 1, "in_channels": 36 if image else 16}
    if image:
        sizes["image_dim"] = 4
    if two_images:
        sizes["pos_embed_seq_len"] = 2 * VISION_TOKENS
    parts = like_wan(diffusers.SkyReelsV2Transformer3DModel(**sizes), flow_shift=8.0)
    encoder = transformers.CLIPVisionModelWithProjection
    return parts | clip_vision(encoder, 32) if image else parts


PARTS = {"skyreels_v2": _skyreels_v2, "skyreels_v2_df": _skyreels_v2}
CASES = {
    "skyreels-v2": Case("skyreels_v2", size(16, 16, 9)),
    "skyreels-v2-image": Case("skyreels_v2", size(16, 16, 9), image=True),
    "skyreels-v2-last-image": Case(
        "skyreels_v2",
        size(16, 16, 9),
        image=True,
        last_image=True,
        changes={"two_images": True},
    ),
    "skyreels-v2-df": Case(
        "skyreels_v2_df",
        size(16, 16, 9),
        unread={"record.2.1": "a table of a few numbers"},
        refused=[({"num_frames": 101}, "`num_frames` must be 1 to 97")],
    ),
}
