"""Tiny Helios checkpoint and its test cases."""

from __future__ import annotations

from typing import Any

import diffusers

from tests.support.families.wan import wan_vae
from tests.support.family_case import Case, size
from tests.support.tiny_parts import TEXT, Parts, t5


def _helios(_: bool) -> Parts:
    return _parts(
        diffusers.HeliosScheduler(stage_range=[0, 1], stages=1, use_dynamic_shifting=True)
    )


def _helios_pyramid(_: bool) -> Parts:
    return _parts(diffusers.HeliosScheduler(gamma=0.25, use_dynamic_shifting=True))


def _helios_distilled(_: bool) -> Parts:
    return _parts(diffusers.HeliosDMDScheduler(gamma=0.25, use_dynamic_shifting=True))


def _parts(scheduler: Any) -> Parts:
    return {
        **t5(kind="UMT5"),
        "vae": wan_vae(16),
        "transformer": diffusers.HeliosTransformer3DModel(
            **{"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1},
            **{"in_channels": 16, "out_channels": 16, "text_dim": TEXT, "freq_dim": 16},
            **{"patch_size": (1, 2, 2), "ffn_dim": 32, "rope_dim": (4, 4, 4)},
        ),
        "scheduler": scheduler,
    }


_UNREAD = {"lower_order_nums": "the second step of a chunk of two is its last, of order 1"}
_OF_STAGES = {
    "block.latents": "the chunk's noise, with whose shape its stages begin again",
    "scheduler.timesteps": "each stage computes them again, and the solver reads their number",
    "lower_order_nums": "the second step of a stage of two is its last, of order 1",
}

PARTS = {
    "helios": _helios,
    "helios_pyramid": _helios_pyramid,
    "helios_distilled": _helios_distilled,
}
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
    "helios-pyramid": Case(
        "helios_pyramid",
        size(64, 64, 65, num_inference_steps=12),
        negative="blurred",
        draws=True,
        unread=_OF_STAGES,
        refused=[
            ({"num_inference_steps": 10}, "all 3 stages ... multiple of 6, got 10"),
            ({"height": 96}, "`height` must be a multiple of 64"),
        ],
    ),
    "helios-distilled": Case(
        "helios_distilled",
        size(64, 64, 65, num_inference_steps=9),
        draws=True,
        unread=_OF_STAGES,
        refused=[
            ({"num_inference_steps": 12}, "multiple of 9 ... first chunk count twice), got 12"),
            ({"guidance_scale": 3.0}, "`guidance_scale` must be 1.0, got 3.0"),
        ],
    ),
    "helios-video": Case(
        "helios_v2v",
        size(16, 16, 65, num_inference_steps=4, video_frames=35),
        image=True,
        draws=True,
        unread=_UNREAD,
        refused=[({"video_frames": 32}, "`video_frames` must be 33 to 1024, got 32")],
    ),
    "helios-pyramid-video": Case(
        "helios_pyramid_v2v",
        size(64, 64, 65, num_inference_steps=12, video_frames=33),
        image=True,
        draws=True,
        unread=_OF_STAGES,
    ),
    "helios-distilled-video": Case(
        "helios_distilled_v2v",
        size(64, 64, 65, num_inference_steps=9, video_frames=33),
        image=True,
        draws=True,
        unread=_OF_STAGES,
    ),
    "helios-pyramid-image": Case(
        "helios_pyramid",
        size(64, 64, 65, num_inference_steps=12),
        image=True,
        draws=True,
        unread=_OF_STAGES,
    ),
    "helios-distilled-image": Case(
        "helios_distilled",
        size(64, 64, 65, num_inference_steps=9),
        image=True,
        draws=True,
        unread=_OF_STAGES,
    ),
}
