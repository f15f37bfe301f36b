"""Verification of checkpoints whose sizes and components differ from those of a family's cases.

The sizes are tiny, but vary like those of published checkpoints: numbers of layers, heads and
channels, compression of the VAE, shifts, optional components, dtypes, and files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers

from svdpp.config import Dtype, ModelConfig
from svdpp.config.families.registry import FAMILY_SPECS
from svdpp.errors import ModelError, RequestError
from svdpp.models.checkpoint import find_checkpoint
from tests.support.clip_inputs import Inputs, verify_case
from tests.support.damage import Damage
from tests.support.families.ltx import LTX_EULER
from tests.support.family_case import Case, size
from tests.support.tiny_families import CASES, save_tiny
from tests.support.tiny_parts import vision

Values = Mapping[str, Any]


def _full(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.slow(pytest.mark.full(test))


_BF16_FILES = {"saved_dtype": torch.bfloat16, "variant": "bf16"}
_SHARDS = {"max_shard_size": "20KB"}
#: Names of config files by component, if they are not `config.json`.
_CONFIG_NAMES = {"scheduler": "scheduler_config.json"}
_EULER = diffusers.FlowMatchEulerDiscreteScheduler


def _old_class_names(tokenizer: str, **others: str) -> Values:
    """Return options of `save_tiny` that save class names as older versions of transformers did."""
    return {"class_names": {"tokenizer": tokenizer, **others}}


@dataclass(frozen=True)
class OtherCheckpoint:
    """Tiny checkpoint to verify that differs from a test case's checkpoint, with its clip."""

    case: str
    """Name of the case in `CASES`."""
    configs: Mapping[str, Values] = field(default_factory=dict)
    """Changed config values, by component."""
    changes: Values = field(default_factory=dict)
    """Replaced components, and other options of `save_tiny`."""
    sampling: Values = field(default_factory=dict)
    """Changed sampling parameters of the clip."""
    dtype: Dtype = "fp32"

    def of_case(self) -> Case:
        case = CASES[self.case]
        changes = {**case.changes, **self.changes, "configs": self.configs}
        return replace(case, sampling={**case.sampling, **self.sampling}, changes=changes)


# --- sizes that several families share ------------------------------------------------------------

#: T5 with another width, and with gated layers as in the published T5 1.1 and UMT5.
_T5 = {
    **{"d_model": 32, "d_kv": 16, "d_ff": 40, "num_layers": 2, "num_heads": 3},
    **{"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True},
}
_WAN = {
    **{"num_attention_heads": 3, "attention_head_dim": 16, "num_layers": 3},
    **{"ffn_dim": 40, "freq_dim": 32, "text_dim": 32, "rope_max_seq_len": 64},
}


def _wan_vae(z_dim: int, **changes: Any) -> Values:
    means = {"latents_mean": [0.2] * z_dim, "latents_std": [1.5] * z_dim}
    widths = {"base_dim": 6, "dim_mult": [1, 2, 2, 1], "num_res_blocks": 2}
    return {"z_dim": z_dim, **means, **widths, **changes}


#: VAE of Wan that halves height and width twice, and the number of frames once.
_LESS_COMPRESSION = {
    **{"dim_mult": [1, 2, 2], "temperal_downsample": [False, True]},
    **{"scale_factor_spatial": 4, "scale_factor_temporal": 2},
}

_CLIP = {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3}
_VACE = {**_WAN, "in_channels": 8, "out_channels": 8, "vace_layers": [0, 2], "vace_in_channels": 80}
_WAN_8 = {
    "text_encoder": _T5,
    "vae": _wan_vae(8),
    "transformer": {**_WAN, "in_channels": 8, "out_channels": 8},
}
_WAN_8_IMAGE = {**_WAN_8, "transformer": {**_WAN_8["transformer"], "in_channels": 20}}
_IMAGE_DIM = {"image_dim": 12, "added_kv_proj_dim": 48}
_VACE_8 = {**_WAN_8, "transformer": _VACE}
_EXPERTS = {"transformer_2": {**_WAN_8["transformer"], "num_layers": 2}}
_ANIMATE = {
    **_WAN_8,
    "image_encoder": _CLIP,
    "transformer": {
        **{**_WAN, **_IMAGE_DIM, "in_channels": 20, "latent_channels": 8, "out_channels": 8},
        **{"num_layers": 4, "inject_face_latents_blocks": 2, "motion_encoder_dim": 12},
        **{"motion_style_dim": 10, "motion_dim": 6, "face_encoder_hidden_dim": 12},
        **{"face_encoder_num_heads": 3, "motion_encoder_batch_size": 3},
    },
}
_SKYREELS = {**_WAN, "in_channels": 8, "out_channels": 8}
_HELIOS = {
    "text_encoder": _T5,
    "vae": _wan_vae(8),
    "transformer": {
        **{"num_attention_heads": 3, "attention_head_dim": 18, "num_layers": 2, "ffn_dim": 40},
        **{"in_channels": 8, "out_channels": 8, "text_dim": 32, "freq_dim": 32},
        **{"rope_dim": (6, 6, 6)},
    },
}
_LTX_DENOISER = {
    **{"num_layers": 3, "num_attention_heads": 3, "attention_head_dim": 16},
    **{"cross_attention_dim": 48, "caption_channels": 32, "in_channels": 12, "out_channels": 12},
}
#: VAE of LTX-Video 0.9.5 and later versions, whose blocks have another class.
_LTX_095_VAE = {
    **{
        "block_out_channels": (8, 8, 16, 16, 16),
        "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
    },
    **{"decoder_block_out_channels": (8, 16, 32), "layers_per_block": (1, 2, 1, 1, 1)},
    **{"decoder_layers_per_block": (1, 1, 2, 1), "spatio_temporal_scaling": (True,) * 4},
    **{"decoder_spatio_temporal_scaling": (True,) * 3, "decoder_inject_noise": (False,) * 4},
    **{"downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal")},
    **{"upsample_residual": (True,) * 3, "upsample_factor": (2,) * 3, "latent_channels": 12},
    **{"spatial_compression_ratio": 32, "temporal_compression_ratio": 8},
}
#: LTX-2 with learned registers and with rotary embeddings in double precision, as in the published
#: model.
_LTX2 = {
    "vae": {
        **{"block_out_channels": (8, 16), "layers_per_block": (1, 2, 1)},
        **{"down_block_types": ("LTX2VideoDownBlock3D",) * 2, "latent_channels": 6},
        **{"decoder_block_out_channels": (8, 16), "decoder_layers_per_block": (1, 2, 1)},
        **dict.fromkeys(
            ("spatio_temporal_scaling", "decoder_spatio_temporal_scaling"), (True,) * 2
        ),
        **{"decoder_inject_noise": (False,) * 3, "upsample_factor": (2, 2), "patch_size": 2},
        **{"downsample_type": ("spatiotemporal",) * 2, "upsample_residual": (True, True)},
        **{"upsample_type": ("spatiotemporal",) * 2, "decoder_causal": True},
    },
    "text_encoder": {"text_config": {"num_hidden_layers": 3, "layer_types": None}},
    "connectors": {
        **{"text_proj_in_factor": 4, "video_connector_num_learnable_registers": 8},
        **{"video_connector_num_layers": 2, "audio_connector_num_learnable_registers": 8},
    },
    "transformer": {
        **{"in_channels": 6, "out_channels": 6, "num_layers": 3, "num_attention_heads": 3},
        **{"cross_attention_dim": 24, "rope_double_precision": True},
        **{"audio_num_attention_heads": 3, "audio_cross_attention_dim": 12},
    },
}
#: LTX-2.3, with gated attention, separate text projections for video and sound, and a vocoder that
#: extends the sound's bandwidth.
_LTX23 = {
    **_LTX2,
    "connectors": {
        **{**_LTX2["connectors"], "per_modality_projections": True, "proj_bias": True},
        **{"video_gated_attn": True, "audio_gated_attn": True},
        **{"video_connector_num_attention_heads": 3, "video_hidden_dim": 24},
        **{"audio_connector_num_attention_heads": 3, "audio_connector_attention_head_dim": 4},
        **{"audio_hidden_dim": 12},
    },
    "transformer": {
        **_LTX2["transformer"],
        **dict.fromkeys(("gated_attn", "cross_attn_mod", "audio_gated_attn"), True),
        **dict.fromkeys(("audio_cross_attn_mod", "perturbed_attn"), True),
        "use_prompt_embeddings": False,
    },
}


def _wide_vocoder() -> Any:
    sizes = {"in_channels": 16, "hidden_channels": 16, "num_mel_channels": 8}
    layers = {"upsample_kernel_sizes": [4, 4], "upsample_factors": [2, 2]}
    resnets = {"resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3, 5]]}
    bwe = {f"bwe_{name}": value for name, value in {**layers, **resnets}.items()}
    bwe |= {"bwe_in_channels": 16, "bwe_hidden_channels": 16, "bwe_upsample_factors": [4, 3]}
    bwe |= {"bwe_upsample_kernel_sizes": [8, 5], "hop_length": 4, "filter_length": 16}
    return diffusers.pipelines.ltx2.LTX2VocoderWithBWE(
        **{**sizes, **layers, **resnets, **bwe, "window_length": 16}
    )


_DYNAMIC_SHIFT = {"use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05}
_LLAMA = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4}
_CLIP_TEXT = {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3}
_HUNYUAN = {
    "text_encoder": _LLAMA,
    "text_encoder_2": _CLIP_TEXT,
    "vae": {"latent_channels": 6, "block_out_channels": (4, 8, 8, 16), "layers_per_block": 2},
    "transformer": {
        **{"in_channels": 6, "out_channels": 6, "num_attention_heads": 3, "num_layers": 2},
        **{"num_single_layers": 2, "num_refiner_layers": 2, "attention_head_dim": 12},
        **{"rope_axes_dim": (4, 4, 4), "text_embed_dim": 32, "pooled_projection_dim": 12},
        **{"patch_size": 2, "mlp_ratio": 2.0},
    },
}
_HUNYUAN_15 = {
    "text_encoder": {
        **{"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4},
        "layer_types": None,
    },
    "text_encoder_2": {**_T5, "d_model": 24},
    "vae": {
        **{"latent_channels": 8, "block_out_channels": (8, 8, 16, 16), "layers_per_block": 2},
        **{"spatial_compression_ratio": 8, "temporal_compression_ratio": 4},
        **{"downsample_match_channel": True, "upsample_match_channel": True},
    },
    "transformer": {
        **{"in_channels": 17, "out_channels": 8, "num_attention_heads": 3, "num_layers": 2},
        **{"text_embed_dim": 32, "text_embed_2_dim": 24, "num_refiner_layers": 2},
        **{"target_size": 32},
    },
    "scheduler": {"shift": 5.0},
}
_COG = {
    "text_encoder": _T5,
    "vae": {"block_out_channels": (4, 8, 8, 8), "latent_channels": 6, "layers_per_block": 2},
    "transformer": {
        **{"in_channels": 6, "out_channels": 6, "num_attention_heads": 3, "num_layers": 2},
        **{"text_embed_dim": 32, "time_embed_dim": 8},
    },
}
_KANDINSKY = {
    **{"num_visual_blocks": 2, "num_text_blocks": 2, "model_dim": 24, "ff_dim": 40},
    **{"axes_dims": (4, 4, 4), "time_dim": 16, "in_text_dim2": 12},
}
_QWEN3 = {"text_config": {"hidden_size": 16}, "vision_config": {"out_hidden_size": 16}}
_MINIMAX = {
    "text_encoder": _QWEN3,
    "transformer": {
        **{"num_attention_heads": 3, "hidden_size": 32, "num_layers": 3, "ffn_dim": 40},
        **{"text_dim": 16, "in_channels": 6, "num_refiner_layers": 1},
    },
    "vae": {
        **{"latent_channels": 6, "layers_per_block": 2, "decoder_num_layers": 2},
        **{"latents_mean": (0.2,) * 6, "latents_std": (1.3,) * 6},
    },
    "scheduler": {"shift": 7.0},
    "audio_scheduler": {"shift": 2.0},
}
#: Cosmos 3 with the VAE of Wan 2.2 5B, as in the published model.
_COSMOS = {
    "vae": {
        **_wan_vae(12, dim_mult=[1, 2, 2, 2], base_dim=4, is_residual=True, patch_size=2),
        **{"in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16},
    },
    "transformer": {
        **{"head_dim": 8, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "num_hidden_layers": 3, "latent_channel": 12},
        **{"latent_patch_size": 2, "patch_latent_dim": 48, "rope_axes_dim": [2, 1, 1]},
        **{"hidden_act": "silu", "qk_norm_for_text": True},
    },
}

_TABLE: dict[str, OtherCheckpoint] = {
    "svd": OtherCheckpoint(
        "svd",
        {
            "vae": {"block_out_channels": (32, 32, 64, 64), "layers_per_block": 2},
            "image_encoder": {"projection_dim": 24, "num_hidden_layers": 2},
            "unet": {
                **{"block_out_channels": (32, 64, 64), "num_attention_heads": (2, 4, 4)},
                **{
                    "down_block_types": (
                        *("CrossAttnDownBlockSpatioTemporal",) * 2,
                        "DownBlockSpatioTemporal",
                    )
                },
                **{
                    "up_block_types": (
                        "UpBlockSpatioTemporal",
                        *("CrossAttnUpBlockSpatioTemporal",) * 2,
                    )
                },
                **{"layers_per_block": 2, "cross_attention_dim": 24, "num_frames": 6},
            },
            "scheduler": {
                "use_karras_sigmas": False,
                "timestep_spacing": "trailing",
                "timestep_type": "discrete",
            },
        },
        {"saved_dtype": torch.float16, "variant": "fp16"},
        size(64, 64, 6),
    ),
    "wan-1.3b": OtherCheckpoint(
        "wan",
        {
            **_WAN_8,
            "vae": _wan_vae(16),
            "transformer": {**_WAN, "in_channels": 16, "out_channels": 16},
            "scheduler": {"flow_shift": 8.0, "solver_order": 3, "disable_corrector": [0]},
        },
        {
            "boundary_ratio": None,
            "transformer_2": None,
            **_old_class_names("T5TokenizerFast"),
            **_SHARDS,
        },
        {"guidance_scale_2": None, "flow_shift": None},
        dtype="bf16",
    ),
    "wan-two-experts": OtherCheckpoint(
        "wan",
        {**_WAN_8, **_EXPERTS},
        {"boundary_ratio": 0.6, "scheduler": _EULER(shift=5.0), **_BF16_FILES},
    ),
    "wan-image-less-compression": OtherCheckpoint(
        "wan-image-bf16",
        {
            **_WAN_8_IMAGE,
            "vae": _wan_vae(8, **_LESS_COMPRESSION),
            **{
                "transformer": {**_WAN_8_IMAGE["transformer"], "in_channels": 18},
                "transformer_2": {**_WAN_8_IMAGE["transformer"], "in_channels": 18},
            },
        },
        {"boundary_ratio": 0.85, "dtype": torch.float32},
        size(32, 48, 5),
        dtype="bf16",
    ),
    "wan-2.1-image": OtherCheckpoint(
        "wan-2.1-image",
        {
            **_WAN_8_IMAGE,
            "image_encoder": _CLIP,
            "transformer": {**_WAN_8_IMAGE["transformer"], **_IMAGE_DIM},
        },
        _BF16_FILES,
    ),
    "wan-2.1-last-image": OtherCheckpoint(
        "wan-2.1-last-image",
        {
            **_WAN_8_IMAGE,
            "image_encoder": {**_CLIP, "patch_size": 16},
            "transformer": {**_WAN_8_IMAGE["transformer"], **_IMAGE_DIM, "pos_embed_seq_len": 10},
        },
        dtype="bf16",
    ),
    "wan-5b": OtherCheckpoint(
        "wan-5b-image",
        {
            "text_encoder": _T5,
            "vae": {
                **_wan_vae(12, base_dim=4, decoder_base_dim=6, dim_mult=[1, 2, 2, 2]),
                "temperal_downsample": [False, True, True],
            },
            "transformer": {**_WAN, "in_channels": 12, "out_channels": 12},
            "scheduler": {"flow_shift": 5.0, "solver_order": 1},
        },
        _SHARDS,
        size(64, 96, 9),
    ),
    "wan-large-patches": OtherCheckpoint(
        "wan",
        {**_WAN_8, "transformer": {**_WAN_8["transformer"], "patch_size": (1, 4, 4)}},
        {"boundary_ratio": None, "transformer_2": None},
        size(64, 96, 5, guidance_scale_2=None),
        dtype="bf16",
    ),
    "wan_v2v": OtherCheckpoint(
        "wan-video", _WAN_8, {"scheduler": _EULER(shift=4.0)}, {"strength": 0.9}
    ),
    "wan_vace": OtherCheckpoint("wan-vace", _VACE_8, _BF16_FILES, dtype="bf16"),
    "wan_vace_control": OtherCheckpoint(
        "wan-vace-control-references", _VACE_8, {"scheduler": _EULER(shift=4.0)}
    ),
    "wan_animate": OtherCheckpoint("wan-animate", _ANIMATE, _SHARDS, dtype="bf16"),
    "wan_replace": OtherCheckpoint("wan-replace", _ANIMATE, {"scheduler": _EULER(shift=4.0)}),
    "wan_modular": OtherCheckpoint(
        "wan-modular-image",
        {
            **_WAN_8_IMAGE,
            "image_encoder": _CLIP,
            "transformer": {**_WAN_8_IMAGE["transformer"], **_IMAGE_DIM},
        },
        {"guider": diffusers.ClassifierFreeGuidance(guidance_rescale=0.5), **_SHARDS},
        dtype="bf16",
    ),
    "wan22_modular": OtherCheckpoint(
        "wan22-modular",
        {**_WAN_8, **_EXPERTS},
        {
            "boundary_ratio": 0.6,
            "scheduler": _EULER(shift=5.0),
            "guider": diffusers.AdaptiveProjectedGuidance(
                adaptive_projected_guidance_momentum=-0.4
            ),
            "guider_2": diffusers.ClassifierFreeZeroStarGuidance(zero_init_steps=1),
        },
    ),
    "wan22_vace_modular": OtherCheckpoint(
        "wan22-vace-modular-image",
        {**_VACE_8, "transformer_2": _VACE},
        {"boundary_ratio": 0.6},
        dtype="bf16",
    ),
    "wan22_vace_control_modular": OtherCheckpoint(
        "wan22-vace-control-modular",
        {**_VACE_8, "transformer_2": _VACE},
        {"scheduler": _EULER(shift=8.0), "saved_dtype": torch.bfloat16},
    ),
    "ltx-static-shift": OtherCheckpoint(
        "ltx-image",
        {
            "text_encoder": _T5,
            "vae": {
                **{f"{half}block_out_channels": (8, 8, 16, 16) for half in ("", "decoder_")},
                **{f"{half}layers_per_block": (1, 2, 1, 1, 1) for half in ("", "decoder_")},
                **{
                    f"{half}spatio_temporal_scaling": (True, True, False, False)
                    for half in ("", "decoder_")
                },
                "latent_channels": 12,
            },
            "transformer": _LTX_DENOISER,
            "scheduler": {"use_dynamic_shifting": False, "shift": 3.0, "shift_terminal": None},
        },
        {**_old_class_names("T5TokenizerFast"), **_SHARDS},
        dtype="bf16",
    ),
    "ltx_condition": OtherCheckpoint(
        "ltx-condition-image",
        {"text_encoder": _T5, "vae": _LTX_095_VAE, "transformer": _LTX_DENOISER},
        {"scheduler": _EULER(shift=3.0, shift_terminal=0.1), **_BF16_FILES},
    ),
    "ltx2": OtherCheckpoint("ltx2", {**_LTX2, "scheduler": _DYNAMIC_SHIFT}, _SHARDS, dtype="bf16"),
    "ltx2-2.3": OtherCheckpoint("ltx2-image", _LTX23, {"vocoder": _wide_vocoder()}, dtype="bf16"),
    "ltx2_condition": OtherCheckpoint("ltx2-condition-image", _LTX2, _BF16_FILES),
    "ltx2_in_context": OtherCheckpoint(
        "ltx2-in-context", {**_LTX2, "scheduler": {"shift": 2.0}}, dtype="bf16"
    ),
    "ltx2_in_context_video": OtherCheckpoint("ltx2-in-context-video", _LTX2),
    "ltx2_in_context_first_image": OtherCheckpoint(
        "ltx2-in-context-first-image", _LTX2, dtype="bf16"
    ),
    "ltx2_modular": OtherCheckpoint(
        "ltx2-modular", {**_LTX2, "scheduler": _DYNAMIC_SHIFT}, _SHARDS
    ),
    "echo": OtherCheckpoint("echo", _LTX2, {"saved_dtype": torch.bfloat16}, dtype="bf16"),
    "minimax_h3": OtherCheckpoint("minimax-h3", _MINIMAX),
    "minimax_h3_references": OtherCheckpoint(
        "minimax-h3-one-reference",
        {
            **{name: values for name, values in _MINIMAX.items() if name != "transformer"},
            "transformer_ref": _MINIMAX["transformer"],
        },
        dtype="bf16",
    ),
    "hunyuan_video": OtherCheckpoint(
        "hunyuan-video",
        {**_HUNYUAN, "transformer": {**_HUNYUAN["transformer"], "guidance_embeds": False}},
        {**_old_class_names("LlamaTokenizerFast"), **_SHARDS, "scheduler": _EULER(shift=17.0)},
    ),
    "hunyuan_video-image": OtherCheckpoint(
        "hunyuan-video-image",
        {**_HUNYUAN, "text_encoder": {"text_config": _LLAMA}},
        _BF16_FILES,
        dtype="bf16",
    ),
    "framepack": OtherCheckpoint(
        "framepack",
        {**_HUNYUAN, "image_encoder": {"num_hidden_layers": 2, "intermediate_size": 24}},
        _BF16_FILES,
        {"num_inference_steps": 4},
    ),
    "helios": OtherCheckpoint(
        "helios",
        {
            **_HELIOS,
            # tested only in float32, because diffusers cannot run such a model in bfloat16
            "transformer": {**_HELIOS["transformer"], "is_amplify_history": True},
            "scheduler": {"use_dynamic_shifting": False, "shift": 3.0},
        },
        _SHARDS,
    ),
    "helios_v2v": OtherCheckpoint(
        "helios-video", {**_HELIOS, "scheduler": {"disable_corrector": [0]}}
    ),
    "helios_pyramid": OtherCheckpoint(
        "helios-pyramid", {**_HELIOS, "scheduler": {"gamma": 0.3}}, _SHARDS, dtype="bf16"
    ),
    "helios_pyramid_v2v": OtherCheckpoint(
        "helios-pyramid-video", {**_HELIOS, "scheduler": {"stage_range": [0, 0.25, 0.5, 1]}}
    ),
    "helios_distilled": OtherCheckpoint(
        "helios-distilled",
        {**_HELIOS, "scheduler": {"use_dynamic_shifting": False, "shift": 2.0}},
        dtype="bf16",
    ),
    "helios_distilled_v2v": OtherCheckpoint(
        "helios-distilled-video",
        {**_HELIOS, "scheduler": {"time_shift_type": "exponential"}},
        {"saved_dtype": torch.bfloat16},
    ),
    "hunyuan_video_15": OtherCheckpoint(
        "hunyuan-video-1.5",
        {**_HUNYUAN_15, "guider": {"guidance_rescale": 0.5}},
        {**_old_class_names("Qwen2TokenizerFast"), **_SHARDS},
        dtype="bf16",
    ),
    "hunyuan_video_15-image": OtherCheckpoint(
        "hunyuan-video-1.5-image",
        {**_HUNYUAN_15, "transformer": {**_HUNYUAN_15["transformer"], "use_meanflow": True}},
        _BF16_FILES,
        size(32, 32, 9),
    ),
    "hunyuan_video_15_modular": OtherCheckpoint(
        "hunyuan-video-1.5-modular",
        _HUNYUAN_15,
        {"guider": diffusers.AdaptiveProjectedGuidance(eta=0.5), "saved_dtype": torch.bfloat16},
        dtype="bf16",
    ),
    "cogvideox-2b": OtherCheckpoint(
        "cogvideox",
        {
            **_COG,
            "transformer": {**_COG["transformer"], "use_rotary_positional_embeddings": False},
            "scheduler": {"prediction_type": "epsilon", "snr_shift_scale": 1.0},
        },
        {"saved_dtype": torch.float16, "variant": "fp16"},
    ),
    "cogvideox-5b-image": OtherCheckpoint(
        "cogvideox-image",
        {
            **_COG,
            "transformer": {
                **_COG["transformer"],
                **{"in_channels": 12, "use_learned_positional_embeddings": True},
            },
        },
        _SHARDS,
        dtype="bf16",
    ),
    "cogvideox-1.5-image": OtherCheckpoint(
        "cogvideox-image",
        {
            **_COG,
            "vae": {**_COG["vae"], "invert_scale_latents": True},
            "transformer": {
                **{**_COG["transformer"], "in_channels": 12, "ofs_embed_dim": 8},
                **{"patch_size_t": 2, "patch_bias": False, "sample_width": 8, "sample_height": 6},
            },
        },
        {
            "scheduler": diffusers.CogVideoXDPMScheduler(
                prediction_type="v_prediction", timestep_spacing="trailing"
            )
        },
        size(32, 48, 13),
    ),
    "cogvideox_v2v": OtherCheckpoint(
        "cogvideox-video",
        {**_COG, "vae": {**_COG["vae"], "temporal_compression_ratio": 4}},
        {
            "scheduler": diffusers.CogVideoXDPMScheduler(prediction_type="v_prediction"),
            **_BF16_FILES,
        },
        dtype="bf16",
    ),
    "skyreels_v2": OtherCheckpoint(
        "skyreels-v2",
        {**_WAN_8, "transformer": _SKYREELS},
        {"scheduler": _EULER(shift=5.0), **_SHARDS},
    ),
    "skyreels_v2-image": OtherCheckpoint(
        "skyreels-v2-image",
        {
            **_WAN_8,
            "image_encoder": _CLIP,
            "transformer": {**_SKYREELS, **_IMAGE_DIM, "in_channels": 20},
            "scheduler": {"flow_shift": 3.0, "solver_order": 3},
        },
        {"image_encoder": transformers.CLIPVisionModel(vision(32, 8)), **_BF16_FILES},
        dtype="bf16",
    ),
    "skyreels_v2_df": OtherCheckpoint(
        "skyreels-v2-df-image",
        {
            **_WAN_8,
            "transformer": {**_SKYREELS, "inject_sample_info": False},
            "scheduler": {"flow_shift": 5.0, "solver_order": 3},
        },
        _SHARDS,
    ),
    "skyreels_v2_df_v2v": OtherCheckpoint(
        "skyreels-v2-df-video", {**_WAN_8, "transformer": _SKYREELS}, dtype="bf16"
    ),
    "kandinsky5": OtherCheckpoint(
        "kandinsky5",
        {
            "text_encoder_2": _CLIP_TEXT,
            "vae": {"block_out_channels": (4, 8, 8, 16), "layers_per_block": 2},
            "transformer": _KANDINSKY,
            "scheduler": {"shift": 10.0},
        },
        _SHARDS,
    ),
    "kandinsky5-image": OtherCheckpoint(
        "kandinsky5-image",
        {"transformer": _KANDINSKY, "text_encoder_2": _CLIP_TEXT},
        _BF16_FILES,
        dtype="bf16",
    ),
    "kandinsky6": OtherCheckpoint(
        "kandinsky6",
        {
            "text_encoder_2": _CLIP_TEXT,
            "transformer": {
                **{**_KANDINSKY, "visual_token_type_num_embeddings": 0},
                **dict.fromkeys(("text_token_padding", "ca_rope", "cross_gates"), False),
                **{"model_dim_a": 12, "ff_dim_a": 16, "time_dim_a": 8, "axes_dims_a": (2, 2, 2)},
            },
            "scheduler": {"shift": 3.0},
        },
        _SHARDS,
    ),
    "mochi": OtherCheckpoint(
        "mochi",
        {
            "text_encoder": _T5,
            "transformer": {
                **{"num_attention_heads": 3, "attention_head_dim": 12, "num_layers": 3},
                **{"pooled_projection_dim": 24, "text_embed_dim": 32, "time_embed_dim": 8},
            },
            "scheduler": {"invert_sigmas": True},
        },
        _BF16_FILES,
        size(16, 32, 13),
        dtype="bf16",
    ),
    "allegro": OtherCheckpoint(
        "allegro",
        {
            "text_encoder": _T5,
            "vae": {"block_out_channels": (2, 4, 4, 4), "latent_channels": 6},
            "transformer": {
                **{"num_attention_heads": 3, "cross_attention_dim": 72, "caption_channels": 32},
                **{"in_channels": 6, "out_channels": 6, "num_layers": 2, "sample_frames": 4},
            },
            "scheduler": {
                "beta_schedule": "scaled_linear",
                "beta_start": 0.00085,
                "timestep_spacing": "leading",
                "steps_offset": 1,
            },
        },
        _SHARDS,
    ),
    "latte": OtherCheckpoint(
        "latte",
        {
            "text_encoder": _T5,
            "vae": {
                **{"block_out_channels": (8, 8, 16), "layers_per_block": 2},
                **{"down_block_types": ("DownEncoderBlock2D",) * 3},
                **{"up_block_types": ("UpDecoderBlock2D",) * 3, "latent_channels": 6},
            },
            "transformer": {
                **{"num_attention_heads": 4, "cross_attention_dim": 32, "num_layers": 2},
                **{"caption_channels": 32, "in_channels": 6, "out_channels": 12, "video_length": 5},
            },
            "scheduler": {
                **{"prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
                **{"timestep_spacing": "trailing", "clip_sample": False},
            },
        },
        _BF16_FILES,
        size(16, 24, 5),
        dtype="bf16",
    ),
    "sana_video": OtherCheckpoint(
        "sana-video-image",
        {
            "text_encoder": {"hidden_size": 32, "num_hidden_layers": 2, "layer_types": None},
            "vae": _wan_vae(8),
            "transformer": {
                **{"num_attention_heads": 3, "num_layers": 3, "num_cross_attention_heads": 3},
                **{"cross_attention_dim": 36, "caption_channels": 32, "mlp_ratio": 3.0},
                **{"in_channels": 8, "out_channels": 8},
            },
            "scheduler": {"flow_shift": 3.0, "solver_order": 3, "algorithm_type": "dpmsolver++"},
        },
        _SHARDS,
    ),
    "cosmos3": OtherCheckpoint("cosmos3", _COSMOS, {}, size(48, 64, 9), dtype="bf16"),
    "cosmos3_sound": OtherCheckpoint(
        "cosmos3-sound", _COSMOS, {"saved_dtype": torch.bfloat16}, size(64, 64, 5)
    ),
    "cosmos3_v2v": OtherCheckpoint(
        "cosmos3-video",
        {**_COSMOS, "scheduler": {"flow_shift": 10.0}},
        _SHARDS,
        size(64, 64, 9),
        dtype="bf16",
    ),
    "cosmos3_distilled": OtherCheckpoint(
        "cosmos3-image-distilled",
        {**_COSMOS, "scheduler": {"shift": 5.0}},
        {"distilled_sigmas": [1.0, 0.9, 0.75, 0.5]},
        size(64, 64, 5),
    ),
}


def _model(folder: Path, case: Case, dtype: Dtype = "fp32") -> ModelConfig:
    variant = case.changes.get("variant")
    return ModelConfig(name=str(folder), family=case.family, dtype=dtype, variant=variant)


def _save(case: Case, folder: Path) -> Path:
    return save_tiny(case.family, folder, image=case.image, **case.changes)


def test_every_family_has_another_checkpoint() -> None:
    assert {CASES[other.case].family for other in _TABLE.values()} == {*FAMILY_SPECS}


@_full
@pytest.mark.parametrize("name", _TABLE)
def test_other_checkpoints_give_the_bits_of_diffusers(
    inputs: Inputs, tmp_path: Path, name: str
) -> None:
    case = _TABLE[name].of_case()
    model = _model(_save(case, tmp_path / "model"), case, _TABLE[name].dtype)
    result = verify_case(case, model, inputs, world_size=2)
    assert result.bitwise, result
    assert {check.rank for check in result.checks} == {0, 1}


@_full
@pytest.mark.parametrize("name", ["wan-two-experts", "cogvideox-1.5-image", "cosmos3"])
def test_a_fault_is_found(inputs: Inputs, tmp_path: Path, name: str) -> None:
    case = _TABLE[name].of_case()
    model = _model(_save(case, tmp_path / "model"), case)
    result = verify_case(case, model, inputs, world_size=2, fault=Damage("ulp", 0, 1))
    first = result.first_difference
    assert first is not None
    assert first.clip == 1, "clip 0 has no fault"


@_full
@pytest.mark.parametrize("name", ["wan-1.3b", "cogvideox-2b", "mochi"])
def test_a_pipeline_that_diffusers_loads_and_saves(
    inputs: Inputs, tmp_path: Path, name: str
) -> None:
    """A checkpoint that diffusers has loaded and saved again can be verified.

    `save_pretrained` writes it in bfloat16 and in shards.
    """
    case = _TABLE[name].of_case()
    first = _save(case, tmp_path / "first")
    options = {"variant": case.changes.get("variant"), "torch_dtype": torch.bfloat16}
    pipe = diffusers.DiffusionPipeline.from_pretrained(first, **options)
    pipe.save_pretrained(tmp_path / "second", max_shard_size="20KB", variant="bf16")
    assert [*tmp_path.glob("second/transformer/*-of-*.safetensors")]
    case = replace(case, changes={**case.changes, "variant": "bf16"})
    result = verify_case(case, _model(tmp_path / "second", case, "bf16"), inputs, world_size=2)
    assert result.bitwise, result


@_full
@pytest.mark.parametrize("name", ["wan22_modular", "helios", "cosmos3"])
def test_a_modular_pipeline_that_diffusers_loads_and_saves(
    inputs: Inputs, tmp_path: Path, name: str
) -> None:
    """A modular checkpoint that diffusers has loaded and saved again can be verified.

    The index then names the folder from which the components were loaded.
    """
    case = _TABLE[name].of_case()
    first = _save(case, tmp_path / "first")
    pipe = diffusers.ModularPipeline.from_pretrained(str(first))
    pipe.load_components(torch_dtype=torch.float32)
    pipe.save_pretrained(str(tmp_path / "second"))
    result = verify_case(case, _model(tmp_path / "second", case), inputs, world_size=2)
    assert result.bitwise, result


@pytest.mark.slow
def test_components_in_another_local_folder_are_refused(tmp_path: Path) -> None:
    case = _TABLE["wan22_modular"].of_case()
    folder = _save(case, tmp_path / "model")
    (folder / "vae").rename(tmp_path / "vae")
    with pytest.raises(ModelError, match=r"the vae is at .* and the checkpoint has no vae"):
        find_checkpoint(_model(folder, case))


def _scaled(levels: int) -> Values:
    halves = ("", "decoder_")
    return {f"{half}spatio_temporal_scaling": (True,) * levels for half in halves}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "configs", "expected"),
    [
        ("wan", {"transformer": {"patch_size": (1, 4, 2)}}, (32, 16)),
        ("skyreels-v2", {"transformer": {"patch_size": (1, 2, 4)}}, (16, 32)),
        ("wan", {"vae": _LESS_COMPRESSION}, (8, 8)),
        ("latte", {}, (8, 8)),
        ("svd", {}, (8, 8)),
        ("ltx", {"vae": {**_scaled(4), "temporal_compression_ratio": 8}}, (64, 64)),
        ("hunyuan-video", {}, (16, 16)),
        (
            "wan",
            {"vae": {"scale_factor_temporal": 8}},
            "compresses 8 frames to one, but .* divisor of 4",
        ),
        ("ltx", {"vae": _scaled(4)}, "compresses 16 frames to one, but .* divisor of 8"),
        ("cogvideox", {"vae": {"temporal_compression_ratio": 8}}, "compresses 8 frames to one"),
        ("wan", {"transformer": {"patch_size": (1, 2, 0)}}, "patch_size is .* not three numbers"),
        (
            "helios",
            {"scheduler": {"shift": 3.0}},
            "shift is 3.0 but must be 1.0, because diffusers",
        ),
    ],
)
def test_sizes_of_clips_follow_the_configs(
    tmp_path: Path, name: str, configs: Mapping[str, Values], expected: tuple[int, int] | str
) -> None:
    case = OtherCheckpoint(name).of_case()
    model = _model(_save(case, tmp_path / "model"), case)
    for part, changes in configs.items():  # diffusers cannot create such models
        path = tmp_path / "model" / part / _CONFIG_NAMES.get(part, "config.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    if isinstance(expected, str):
        with pytest.raises(ModelError, match=expected):
            find_checkpoint(model, weights=False)
    else:
        assert find_checkpoint(model, weights=False).size_multiple == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "other", "problem"),
    [
        (
            "wan-two-experts",
            {"scheduler": diffusers.DPMSolverMultistepScheduler()},
            "the scheduler 'DPMSolverMultistepScheduler' is not supported: svdpp's tests",
        ),
        (
            "cogvideox-2b",
            {"scheduler": diffusers.DDIMScheduler()},
            "the scheduler 'DDIMScheduler' is not supported: svdpp's tests",
        ),
        (
            "mochi",
            {"scheduler": _EULER(stochastic_sampling=True)},
            "the key stochastic_sampling is not supported: it draws noise in every step",
        ),
        (
            "wan-1.3b",
            {"boundary_ratio": 0.9},
            "boundary_ratio is 0.9, but the expert transformer_2 is missing",
        ),
    ],
)
def test_components_that_are_refused(
    tmp_path: Path, name: str, other: Values, problem: str
) -> None:
    changed = _TABLE[name]
    configs = {part: v for part, v in changed.configs.items() if part not in other}
    changes = {**changed.changes, **other}
    case = replace(changed, configs=configs, changes=changes).of_case()
    with pytest.raises(ModelError, match=re.escape(problem)):
        find_checkpoint(_model(_save(case, tmp_path / "model"), case), weights=False)


@pytest.mark.slow
def test_a_scheduler_that_the_pipeline_cannot_run(inputs: Inputs, tmp_path: Path) -> None:
    other = replace(_TABLE["ltx_condition"], changes={"scheduler": _EULER(**LTX_EULER)})
    case = other.of_case()
    with pytest.raises(RequestError, match="`mu` must be passed when `use_dynamic_shifting`"):
        verify_case(case, _model(_save(case, tmp_path / "model"), case), inputs, world_size=2)
