"""Tiny Sana-Video checkpoints and their test cases."""

from __future__ import annotations

import diffusers
import transformers

from tests.support.families.wan import wan_vae
from tests.support.family_case import Case, size
from tests.support.tiny_parts import LLM, TEXT, Parts, letters

_EULER = {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=8.0)}


def _sana_video(_: bool) -> Parts:
    gemma = transformers.Gemma2Config(
        **LLM, head_dim=8, num_hidden_layers=1, num_key_value_heads=2, pad_token_id=0
    )
    return {
        "tokenizer": letters("GemmaTokenizerFast", "<pad>", "<eos>", "<bos>", "<unk>", "<mask>"),
        "text_encoder": transformers.Gemma2Model(gemma),
        "vae": wan_vae(16),
        "transformer": diffusers.SanaVideoTransformer3DModel(
            **{"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2},
            **{"num_cross_attention_heads": 2, "cross_attention_head_dim": 12},
            **{"cross_attention_dim": 24, "caption_channels": TEXT, "rope_max_seq_len": 32},
        ),
        "scheduler": diffusers.DPMSolverMultistepScheduler(
            **{"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 8.0}
        ),
    }


PARTS = {"sana_video": _sana_video}
CASES = {
    "sana-video": Case("sana_video", size(32, 32, 9)),
    "sana-video-image": Case("sana_video", size(32, 32, 9), image=True),
    "sana-video-image-euler": Case(
        *("sana_video", size(32, 32, 9)), image=True, changes=_EULER, is_stateless=True
    ),
}
