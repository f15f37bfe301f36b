"""Tiny CogVideoX checkpoints and their test cases."""

from __future__ import annotations

import diffusers

from tests.support.family_case import Case, size
from tests.support.tiny_parts import DENOISER, TEXT, Parts, t5

_DPM = diffusers.CogVideoXDPMScheduler(prediction_type="v_prediction", timestep_spacing="trailing")
_OF_DPM = {"result.0.0.1": "of this family's other scheduler, step reads it"}


def _cogvideox(image: bool) -> Parts:
    return {
        **t5(),
        "vae": diffusers.AutoencoderKLCogVideoX(
            block_out_channels=(8,) * 4, latent_channels=4, layers_per_block=1, norm_num_groups=2
        ),
        "transformer": diffusers.CogVideoXTransformer3DModel(
            **{**DENOISER, "in_channels": 8 if image else 4, "attention_head_dim": 16},
            **{"time_embed_dim": 2, "text_embed_dim": TEXT, "max_text_seq_length": 8},
            **{"sample_width": 4, "sample_height": 4, "sample_frames": 9},
            use_rotary_positional_embeddings=True,
        ),
        "scheduler": diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction"),
    }


PARTS = {"cogvideox": _cogvideox}
CASES = {
    "cogvideox": Case("cogvideox", size(32, 32, 9), is_stateless=True, unread=_OF_DPM),
    "cogvideox-dpm": Case(
        *("cogvideox", size(32, 32, 9)), changes={"scheduler": _DPM}, is_stateless=True, draws=True
    ),
    "cogvideox-image": Case(
        "cogvideox", size(32, 32, 9), image=True, is_stateless=True, unread=_OF_DPM
    ),
    "cogvideox-video": Case(
        "cogvideox_v2v", size(32, 32, 9), image=True, is_stateless=True, unread=_OF_DPM
    ),
}
