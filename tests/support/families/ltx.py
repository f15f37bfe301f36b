"""Tiny LTX-Video checkpoints, including version 0.9.5, and their test cases."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from tests.support.family_case import BF16, UNGUIDED, Case, size
from tests.support.tiny_parts import TEXT, Parts, t5

#: Scheduler config of the published LTX-Video (Lightricks/LTX-Video).
LTX_EULER = {
    "base_image_seq_len": 1024,
    "base_shift": 0.95,
    "max_image_seq_len": 4096,
    "max_shift": 2.05,
    "shift_terminal": 0.1,
    "use_dynamic_shifting": True,
}
TIMESTEP = {"timestep_conditioning": True}
_SIZE = size(64, 64, 9)
_DECODED = {"decode_timestep": 0.05, "decode_noise_scale": 0.025}
_POSITIONS = "each position's noise level is found by its timestep"


def _ltx(
    _: bool,
    *,
    timestep_conditioning: bool = False,
    scheduler: Any = None,
    dtype: torch.dtype = torch.float32,
) -> Parts:
    # The components are created in this order, because their random weights depend on it.
    text, halves = t5(dtype=dtype), ("", "decoder_")
    vae = diffusers.AutoencoderKLLTXVideo(
        **{f"{half}block_out_channels": (8,) * 4 for half in halves},
        **{f"{half}layers_per_block": (1,) * 5 for half in halves},
        **{"latent_channels": 8, "timestep_conditioning": timestep_conditioning},
    )
    vae.latents_mean += 0.1 * torch.arange(8)
    vae.latents_std += 0.1 * torch.arange(8)
    transformer = diffusers.LTXVideoTransformer3DModel(
        **{"in_channels": 8, "out_channels": 8, "num_layers": 1},
        **{"num_attention_heads": 2, "attention_head_dim": 12},
        **{"cross_attention_dim": 24, "caption_channels": TEXT},
    )
    return {
        **text,
        "vae": vae.to(dtype),
        "transformer": transformer.to(dtype),
        "scheduler": scheduler or FlowMatchEulerDiscreteScheduler(**LTX_EULER),
    }


def _ltx_condition(image: bool) -> Parts:
    plain = FlowMatchEulerDiscreteScheduler()
    return _ltx(image, timestep_conditioning=True, scheduler=plain)


def _case(changes: dict[str, Any], more: dict[str, Any] | None = None, **options: Any) -> Case:
    sizes = {**_SIZE, "width": 96, "num_inference_steps": 4}
    return Case("ltx", {**sizes, **(more or {})}, changes=changes, **options)


PARTS = {"ltx": _ltx, "ltx_condition": _ltx_condition}
CASES = {
    "ltx": _case(
        {},
        {"guidance_rescale": 0.7, "fps": 23.976},
        refused=[
            ({"num_inference_steps": 1}, "`num_inference_steps` must be 2 or more"),
            ({"decode_timestep": 0.1}, "`decode_timestep` has no effect on model"),
        ],
    ),
    "ltx-unguided": _case({}, UNGUIDED),
    "ltx-image-timestep-bf16": _case({**TIMESTEP, **BF16}, _DECODED, image=True),
    "ltx-timestep": _case(TIMESTEP, {"decode_timestep": 0.05}),
    "ltx-image": _case({}, image=True),
    "ltx-condition": Case(
        "ltx_condition",
        _SIZE,
        unread={"noise": "a clip from an image reads it", "_step_index": _POSITIONS},
    ),
    "ltx-condition-image": Case(
        "ltx_condition",
        {**_SIZE, **_DECODED},
        image=True,
        draws=True,
        unread={"_step_index": _POSITIONS},
    ),
    "ltx-condition-last-image": Case(
        "ltx_condition",
        {**_SIZE, **_DECODED},
        image=True,
        last_image=True,
        draws=True,
        unread={"_step_index": _POSITIONS},
        refused=[
            ({"from_image": False}, "`last_image` needs a first image"),
            ({"num_frames": 1}, "`last_image` needs at least 2 `num_frames`"),
        ],
    ),
}
