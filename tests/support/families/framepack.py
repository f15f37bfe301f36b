"""Tiny FramePack checkpoint and its test cases."""

from __future__ import annotations

import diffusers

from tests.support.families.hunyuan_video import HUNYUAN, hunyuan_video
from tests.support.family_case import Case, size
from tests.support.tiny_parts import Parts, siglip


def _framepack(_: bool) -> Parts:
    parts = {**hunyuan_video(image=False), **siglip()}
    parts["transformer"] = diffusers.HunyuanVideoFramepackTransformer3DModel(
        **HUNYUAN, has_image_proj=True, image_proj_dim=12, has_clean_x_embedder=True
    )
    return parts


PARTS = {"framepack": _framepack}
CASES = {
    "framepack": Case(
        "framepack",
        size(32, 32, 37),
        image=True,
        refused=[
            ({"num_inference_steps": 3, "num_frames": 73}, "a multiple of 2, got 3"),
            ({"num_frames": 1}, "`num_frames` must be 37 to 1024"),
            ({"num_frames": 38}, "use `num_frames` 37 or `num_frames` 73"),
        ],
    ),
    "framepack-last-image": Case(
        "framepack",
        size(32, 32, 73, num_inference_steps=4),
        image=True,
        last_image=True,
        draws=True,
    ),
    "framepack-chunks": Case(
        "framepack", size(32, 32, 109, num_inference_steps=6), image=True, draws=True
    ),
}
