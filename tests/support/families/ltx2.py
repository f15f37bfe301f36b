"""Tiny LTX-2 checkpoints and their test cases."""

from __future__ import annotations

import diffusers
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler

from tests.support.family_case import Case, size
from tests.support.tiny_parts import DENOISER, LLM, TEXT, VISION, Parts, letters

_SIZE = size(32, 32, 9, stg_block=1)


def ltx2_parts(_: bool, *, patch_size: int = 1, downsample_type: str = "spatial") -> Parts:
    text = {**LLM, "head_dim": 8, "num_hidden_layers": 2, "num_key_value_heads": 1}
    vision = {**VISION, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=1
    )
    head = {"num_attention_heads": 2, "attention_head_dim": 8}
    connector = {**head, "num_layers": 1, "num_learnable_registers": None}
    connectors = {f"{a}_connector_{b}": connector[b] for a in ("video", "audio") for b in connector}
    rope: Parts = {"rope_double_precision": False, "rope_type": "split"}
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        **{"base_channels": 4, "ch_mult": (1,), "num_res_blocks": 1},
        **{"resolution": 32, "latent_channels": 2, "mel_bins": 8},
    )
    return {
        "tokenizer": letters(
            *("GemmaTokenizerFast", "<pad>", "<eos>", "<bos>", "<unk>", "<mask>"),
            padding_side="left",
        ),
        "text_encoder": transformers.Gemma3ForConditionalGeneration(config),
        "connectors": diffusers.pipelines.ltx2.LTX2TextConnectors(
            **{"caption_channels": TEXT, "text_proj_in_factor": 3, **connectors},
            **{"connector_rope_base_seq_len": 32, **rope},
        ),
        "vae": diffusers.AutoencoderKLLTX2Video(
            **{"latent_channels": 4, "block_out_channels": (8,), "layers_per_block": (1,)},
            **{"decoder_block_out_channels": (8,), "decoder_layers_per_block": (1, 1)},
            **{"spatio_temporal_scaling": (True,), "decoder_spatio_temporal_scaling": (True,)},
            **{"decoder_inject_noise": (False, False), "downsample_type": (downsample_type,)},
            **{"upsample_residual": (False,), "upsample_factor": (1,)},
            **{"patch_size": patch_size, "decoder_causal": False},
        ),
        "audio_vae": audio_vae,
        "vocoder": diffusers.pipelines.ltx2.LTX2Vocoder(
            **{"in_channels": 16, "hidden_channels": 32, "output_sampling_rate": 16000},
            **{"upsample_kernel_sizes": [4, 4], "upsample_factors": [2, 2]},
            **{"resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3, 5]]},
        ),
        "transformer": diffusers.LTX2VideoTransformer3DModel(
            **{**DENOISER, **head, "num_layers": 2, "cross_attention_dim": 16},
            **{"audio_in_channels": 4, "audio_out_channels": 4, "audio_cross_attention_dim": 8},
            **{"audio_num_attention_heads": 2, "audio_attention_head_dim": 4},
            **{"caption_channels": TEXT, **rope},
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }


_UNREAD = {
    "block.audio_scheduler.timesteps": "the scheduler of the sound already knows its next step",
}


def _in_context(_: bool) -> Parts:
    """Return components of a tiny LTX-2 with a VAE that has few latent positions.

    The VAE's encoder turns a video into as many latent positions as the VAE's decoder needs to
    produce a video of the same size.
    """
    return ltx2_parts(_, patch_size=8, downsample_type="spatiotemporal")


PARTS = {
    **dict.fromkeys(("ltx2", "ltx2_condition", "ltx2_modular"), ltx2_parts),
    **dict.fromkeys(
        ("ltx2_in_context", "ltx2_in_context_video", "ltx2_in_context_first_image"), _in_context
    ),
}
CASES = {
    "ltx2": Case("ltx2", _SIZE),
    "ltx2-image": Case("ltx2", {**_SIZE, "stg_scale": 0.0, "audio_stg_scale": 0.0}, image=True),
    "ltx2-condition-last-image": Case("ltx2_condition", _SIZE, image=True, last_image=True),
    "ltx2-condition-image": Case("ltx2_condition", {**_SIZE, "strength": 0.5}, image=True),
    "ltx2-condition": Case("ltx2_condition", _SIZE),
    "ltx2-in-context": Case("ltx2_in_context", {**_SIZE, "reference_strength": 0.5}, image=True),
    "ltx2-in-context-video": Case(
        "ltx2_in_context_video",
        {
            **size(64, 64, 9, stg_block=1, reference_downscale_factor=2),
            "conditioning_attention_strength": 0.5,
        },
        image=True,
        refused=[({"height": 96}, "`height` must be a multiple of 64 with `reference_downscale")],
    ),
    "ltx2-in-context-first-image": Case("ltx2_in_context_first_image", _SIZE, image=True),
    "ltx2-modular": Case("ltx2_modular", _SIZE, unread=_UNREAD),
    "ltx2-modular-image": Case(
        "ltx2_modular",
        _SIZE,
        image=True,
        refused=[({"num_frames": 1}, "`num_frames` of a clip from an image must be at least 9")],
        unread={**_UNREAD, "latents": "steps read the latent with the image, its first frame"},
    ),
}
