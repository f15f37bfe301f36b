"""Tiny Kandinsky 6 checkpoints, also a distilled one, and their test cases."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import FlowMatchEulerDiscreteScheduler, PiflowScheduler

from tests.support.families.kandinsky5 import qwen_vl
from tests.support.family_case import UNGUIDED, Case, size
from tests.support.tiny_parts import TEXT, Parts

_SIZE = size(32, 32, 9, max_sequence_length=1024)
#: Number of predictions in the output of the distilled model.
_GRID = 2


def _kandinsky6(_: bool, *, distilled: bool = False) -> Parts:
    width = _GRID if distilled else 1
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=5.0)
    if distilled:
        scheduler = PiflowScheduler(n_grid=_GRID, num_policy_substeps=8)
    mel = {"mel_bins": 8, "latent_channels": 2, "hidden_channels": 8}
    return {
        **qwen_vl(),
        "transformer": diffusers.Kandinsky6Transformer3DModel(
            **{"in_text_dim": TEXT, "in_text_dim2": 8, "time_dim": 8, "model_dim": 12},
            **{"ff_dim": 16, "num_text_blocks": 1, "num_visual_blocks": 1},
            **{"axes_dims": (2, 2, 2), "visual_token_type_num_embeddings": 2},
            **{"in_visual_dim": 4, "out_visual_dim": 4 * width},
            **{"in_audio_dim": 2, "out_audio_dim": 2 * width},
            **dict.fromkeys(("text_token_padding", "ca_rope"), True),
            **dict.fromkeys(("cross_gates", "fix_modulation"), True),
        ),
        "audio_vae": diffusers.MMAudioVAE(
            **mel, channel_multipliers=(1, 2), layers_per_block=1, sample_rate=8000, hop_length=64
        ),
        "vocoder": diffusers.MMAudioVocoder(
            **{"num_mels": 8, "upsample_initial_channel": 16, "upsample_rates": (8, 8)},
            **{"upsample_kernel_sizes": (16, 16), "resblock_kernel_sizes": (3,)},
            **{"resblock_dilation_sizes": ((1, 3),)},
        ),
        "scheduler": scheduler,
    }


PARTS = {"kandinsky6": _kandinsky6}
CASES = {
    "kandinsky6": Case("kandinsky6", _SIZE),
    "kandinsky6-image": Case("kandinsky6", _SIZE, image=True),
    "kandinsky6-distilled": Case(
        "kandinsky6",
        {**_SIZE, **UNGUIDED},
        image=True,
        changes={"distilled": True},
        refused=[
            ({"guidance_scale": 5.0}, "`guidance_scale` must be at most 1 for a distilled model")
        ],
    ),
}
