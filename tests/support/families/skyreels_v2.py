"""Tiny SkyReels-V2 checkpoints, also for the diffusion forcing pipelines, and their test cases."""

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


def _skyreels_v2_df(_: bool) -> Parts:
    sizes = {**wan_sizes(1), "num_layers": 1, "in_channels": 16, "inject_sample_info": True}
    return like_wan(diffusers.SkyReelsV2Transformer3DModel(**sizes), flow_shift=8.0)


def _unread_table(record: int) -> dict[str, str]:
    """Return `Case.unread` for the packet's record of a call of `generate_timestep_matrix`.

    `record` is the number of this call's record in the packet, from 0.
    """
    return {f"record.{record}.1": "a table of a few numbers"}


PARTS = {"skyreels_v2": _skyreels_v2, "skyreels_v2_df": _skyreels_v2_df}
CASES = {
    "skyreels-v2": Case(
        "skyreels_v2",
        size(16, 16, 9),
        refused=[({"num_inference_steps": 200}, "200 steps have the same timestep, 999")],
    ),
    "skyreels-v2-image": Case(
        "skyreels_v2",
        size(16, 16, 9),
        image=True,
        refused=[
            ({"has_last_image": True}, "takes no `last_image`: its denoiser embeds only one image")
        ],
    ),
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
        unread=_unread_table(2),
        refused=[
            ({"num_frames": 101}, "`num_frames` must be 1 to 97"),
            ({"num_inference_steps": 200}, "200 steps have the same timestep, 999"),
        ],
    ),
    "skyreels-v2-df-image": Case(
        "skyreels_v2_df",
        size(16, 16, 9),
        image=True,
        unread=_unread_table(3),
        refused=[({"num_frames": 1}, "must be more than 1, got 1")],
    ),
    "skyreels-v2-df-last-image": Case(
        "skyreels_v2_df", size(16, 16, 9), image=True, last_image=True, unread=_unread_table(4)
    ),
    "skyreels-v2-df-video": Case(
        "skyreels_v2_df_v2v",
        size(16, 16, 18, video_frames=5),
        image=True,
        negative="blurred",
        unread=_unread_table(3),
        refused=[
            ({"num_inference_steps": 200}, "200 steps have the same timestep, 999"),
            ({"video_frames": 97}, "`video_frames` must be 1 to 93, got 97"),
            ({"video_frames": 6}, "`video_frames` must be a multiple of 4 plus 1, got 6"),
            ({"num_frames": 10}, "with `video_frames` 5, `num_frames` must be 14 to 102, got 10"),
            ({"num_frames": 106}, "with `video_frames` 5, `num_frames` must be 14 to 102, got 106"),
            ({"num_frames": 17}, "`num_frames` must be a multiple of 4 plus 2, got 17"),
        ],
    ),
}
