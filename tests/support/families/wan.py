"""Tiny Wan checkpoints (with one and two experts, VACE, Animate), and their test cases."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from diffusers import (
    AdaptiveProjectedGuidance,
    AdaptiveProjectedMixGuidance,
    ClassifierFreeGuidance,
    ClassifierFreeZeroStarGuidance,
    FlowMatchEulerDiscreteScheduler,
    SkipLayerGuidance,
    UniPCMultistepScheduler,
)

from tests.support.family_case import BF16, UNGUIDED, Case, size
from tests.support.tiny_parts import TEXT, VISION_TOKENS, Parts, clip_vision, t5

#: Scheduler config of the published Wan 2.2 (Wan-AI/Wan2.2-T2V-A14B-Diffusers).
WAN_UNIPC = {
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
    "solver_order": 2,
}
T2V = {"boundary_ratio": 0.875}
I2V = {"boundary_ratio": 0.9}
WAN_5B = {"expand_timesteps": True}
_EULER = {"scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0)}
_ORDER_3 = {"scheduler": UniPCMultistepScheduler(**{**WAN_UNIPC, "solver_order": 3})}
_EQUAL_TIMESTEPS: list[tuple[dict[str, Any], str]] = [
    ({"num_inference_steps": 500}, "500 steps have the same timestep, 999")
]
_OWN_SCALES = {"guidance_scale_2": 2.0, "flow_shift": 5.0}
#: Guiders of modular checkpoints. With some of them, the guidance changes, starts or ends during a
#: clip.
_MOMENTUM = AdaptiveProjectedGuidance(adaptive_projected_guidance_momentum=-0.5)
_MIXED = AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=1)
_INTERVAL = ClassifierFreeGuidance(start=0.3, stop=0.8)
_ZERO_FIRST = ClassifierFreeZeroStarGuidance(zero_init_steps=1)
_SKIPPED_LAYERS = SkipLayerGuidance(
    skip_layer_config={"indices": [0]}, skip_layer_guidance_start=0.0, skip_layer_guidance_stop=0.7
)


def _wan(
    image: bool,
    *,
    boundary_ratio: float | None = None,
    expand_timesteps: bool = False,
    image_encoder: bool = False,
    two_images: bool = False,
    scheduler: Any = None,
    dtype: torch.dtype = torch.float32,
    width: int = 1,
    layers: int = 1,
) -> Parts:
    """Return the components of a tiny Wan.

    With `boundary_ratio` there are two transformers, as in Wan 2.2 A14B. `expand_timesteps` gives
    Wan 2.2 5B, `image_encoder` gives Wan 2.1 image-to-video, and `two_images` gives Wan 2.1 FLF2V.
    `width` multiplies all numbers of channels.
    """
    z_dim = 8 if expand_timesteps else 4
    denoiser = {
        **{**wan_sizes(width), "num_layers": layers, "out_channels": z_dim},
        **{"in_channels": 2 * z_dim + 4 if image else z_dim},
        **({"image_dim": 4, "added_kv_proj_dim": 24 * width} if image_encoder else {}),
        **({"pos_embed_seq_len": 2 * VISION_TOKENS} if two_images else {}),
    }
    # The components are created in this order. The random weights depend on the order, and the
    # clips in tests/golden depend on the weights.
    parts = {
        **t5(width, "UMT5", dtype),
        "vae": wan_vae(z_dim, expand_timesteps, width),
        "scheduler": scheduler or UniPCMultistepScheduler(**WAN_UNIPC),
        "transformer": diffusers.WanTransformer3DModel(**denoiser).to(dtype),
        "transformer_2": None,
        "boundary_ratio": boundary_ratio,
    }
    if boundary_ratio is not None:
        parts["transformer_2"] = diffusers.WanTransformer3DModel(**denoiser).to(dtype)
    if not image:
        return {**parts, "expand_timesteps": expand_timesteps}
    if image_encoder:
        return parts | clip_vision(transformers.CLIPVisionModel, 32)
    return {**parts, "image_processor": None, "image_encoder": None}


def like_wan(transformer: Any, **changes: float) -> Parts:
    scheduler = UniPCMultistepScheduler(**{**WAN_UNIPC, **changes})
    return {
        **t5(kind="UMT5"),
        "vae": wan_vae(16),
        "transformer": transformer,
        "scheduler": scheduler,
    }


def wan_vae(z_dim: int, residual: bool = False, width: int = 1) -> diffusers.AutoencoderKLWan:
    sizes: dict[str, Any] = {
        "latents_mean": [0.1 * index for index in range(z_dim)],
        "latents_std": [1.0 + 0.1 * index for index in range(z_dim)],
    }
    if residual:
        sizes |= {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
        sizes |= {"scale_factor_spatial": 16}
    return diffusers.AutoencoderKLWan(
        base_dim=4 * width,
        z_dim=z_dim,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        **sizes,
    )


def wan_sizes(width: int) -> dict[str, Any]:
    return {
        **{"num_attention_heads": 2 * width, "attention_head_dim": 12, "ffn_dim": 24 * width},
        **{"text_dim": TEXT * width, "freq_dim": 16, "rope_max_seq_len": 32},
    }


def _wan_vace(_: bool) -> Parts:
    sizes = {**wan_sizes(1), "num_layers": 2, "vace_layers": [0, 1]}
    transformer = diffusers.WanVACETransformer3DModel(**sizes)
    for block in transformer.vace_blocks:
        torch.nn.init.normal_(block.proj_out.weight, std=0.1)
    return like_wan(transformer)


def _wan22_vace(_: bool) -> Parts:
    """Return the components of a tiny Wan 2.2 VACE, with two experts."""
    second = _wan_vace(False)["transformer"]
    return {**_wan_vace(False), "transformer_2": second, **T2V}


def _wan_animate(_: bool) -> Parts:
    motion = {"size": 16, "dim": 8, "channel_sizes": {"4": 8, "8": 8, "16": 8}}
    transformer = diffusers.WanAnimateTransformer3DModel(
        **{**wan_sizes(1), "num_layers": 2, "image_dim": 4, "added_kv_proj_dim": 24},
        **{f"motion_encoder_{name}": size for name, size in motion.items()},
        **{"motion_style_dim": 8, "motion_dim": 4, "inject_face_latents_blocks": 1},
        **{"face_encoder_hidden_dim": 8, "face_encoder_num_heads": 2},
    )
    return like_wan(transformer) | clip_vision(transformers.CLIPVisionModel, 16)


def _wan_modular(image: bool, width: int = 1, layers: int = 1) -> Parts:
    return _wan(image, image_encoder=image, width=width, layers=layers)


def _wan22_modular(image: bool) -> Parts:
    return _wan(image, boundary_ratio=0.9 if image else 0.875)


def _guided(family: str, guider: Any, **changes: Any) -> Case:
    """Return the test case of a modular checkpoint with a guider, or one guider for each expert."""
    sizes = size(32, 32, 5, num_inference_steps=4)
    if family != "wan_modular":
        changes["guider_2"] = guider
        # with this shift, the first expert has three of the four steps
        sizes |= {"guidance_scale_2": 2.0, "flow_shift": 12.0}
    return Case(family, sizes, changes={"guider": guider, **changes}, negative="blurred")


def _case(
    changes: dict[str, Any], more: dict[str, Any] | None = None, side: int = 32, **options: Any
) -> Case:
    sizes = {"height": side, "width": side, "num_frames": 5, "num_inference_steps": 4}
    return Case("wan", {**sizes, **(more or {})}, changes=changes, **options)


PARTS = {
    "wan": _wan,
    "wan_vace": _wan_vace,
    "wan_vace_control": _wan_vace,
    "wan_animate": _wan_animate,
    "wan_replace": _wan_animate,
    "wan_modular": _wan_modular,
    "wan22_modular": _wan22_modular,
    "wan22_vace_modular": _wan22_vace,
    "wan22_vace_control_modular": _wan22_vace,
}

CASES = {
    "wan": _case(
        T2V,
        _OWN_SCALES,
        negative="blurred",
        refused=[
            (
                {"num_frames": 80},
                "`num_frames` must be a multiple of 4 plus 1, got 80 ... `num_frames` 77",
            ),
            ({"height": 40}, "`height` must be a multiple of 16 ... got 40"),
        ],
    ),
    "wan-euler-bf16": _case({**T2V, **BF16, **_EULER}),
    "wan-image-bf16": _case({**I2V, **BF16}, image=True),
    "wan-2.1-image": _case(
        {"image_encoder": True},
        image=True,
        refused=[
            ({"guidance_scale_2": 2.0}, "`guidance_scale_2` has no effect on model"),
            ({"has_last_image": True}, "takes no `last_image`: its denoiser embeds only one image"),
        ],
    ),
    "wan-last-image": _case(I2V, image=True, last_image=True),
    "wan-2.1-last-image": _case(
        {"image_encoder": True, "two_images": True},
        image=True,
        last_image=True,
        refused=[({"has_last_image": False}, "needs a `last_image`")],
    ),
    "wan-video": Case(
        "wan_v2v",
        size(32, 32, 5, num_inference_steps=4, strength=0.7),
        image=True,
        negative="blurred",
    ),
    "wan-5b-unguided": _case(WAN_5B, UNGUIDED, 64),
    "wan-5b-image": _case(
        WAN_5B,
        side=64,
        image=True,
        negative="static",
        refused=[
            ({"height": 48}, "multiple of 32 from 32 to 4096, got 48"),
            ({"has_last_image": True}, "takes no `last_image`: ... expand_timesteps"),
            *_EQUAL_TIMESTEPS,
        ],
    ),
    "wan-order-3": _case({**T2V, **_ORDER_3}),
    "wan-vace": Case("wan_vace", size(32, 32, 9), refused=_EQUAL_TIMESTEPS),
    "wan-vace-image": Case("wan_vace", size(32, 32, 9), image=True),
    "wan-vace-references": Case("wan_vace", size(32, 32, 9), image=True, num_references=2),
    "wan-vace-control-references": Case(
        "wan_vace_control", size(32, 48, 9), image=True, num_references=1
    ),
    "wan-vace-control": Case("wan_vace_control", size(32, 48, 9), image=True),
    "wan-animate": Case(
        "wan_animate", size(32, 48, 9, guidance_scale=4.0), image=True, negative="blurred"
    ),
    "wan-replace": Case("wan_replace", size(32, 32, 9), image=True),
    "wan-replace-guided": Case("wan_replace", size(32, 32, 9, guidance_scale=4.0), image=True),
    "wan-modular": Case(
        "wan_modular", size(32, 32, 5), negative="blurred", refused=_EQUAL_TIMESTEPS
    ),
    "wan-modular-image": Case("wan_modular", size(32, 32, 5), image=True),
    "wan-modular-momentum": _guided("wan_modular", _MOMENTUM),
    "wan-modular-mixed": _guided("wan_modular", _MIXED),
    "wan-modular-interval": _guided("wan_modular", _INTERVAL),
    "wan-modular-zero-first": _guided("wan_modular", _ZERO_FIRST),
    "wan-modular-skipped-layers": _guided("wan_modular", _SKIPPED_LAYERS, layers=2),
    "wan22-modular": Case(
        "wan22_modular",
        size(32, 32, 5, num_inference_steps=4, **_OWN_SCALES),
        negative="blurred",
        refused=[
            (
                {"guidance_scale": 1.0},
                "`guidance_scale` 1 with `guidance_scale_2` 2.0 ... encodes no negative prompt",
            ),
        ],
    ),
    "wan22-modular-image": Case(
        "wan22_modular", size(32, 32, 5, num_inference_steps=4), image=True
    ),
    "wan22-modular-momentum": _guided("wan22_modular", _MOMENTUM),
    "wan22-modular-interval": _guided("wan22_modular", _INTERVAL),
    "wan22-modular-skipped-layers": _guided("wan22_modular", _SKIPPED_LAYERS),
    "wan22-vace-modular": Case(
        "wan22_vace_modular", size(32, 32, 9, num_inference_steps=4, **_OWN_SCALES)
    ),
    "wan22-vace-modular-image": Case(
        "wan22_vace_modular",
        size(32, 32, 9, num_inference_steps=4, conditioning_scale=0.8),
        image=True,
        negative="blurred",
    ),
    "wan22-vace-modular-references": Case(
        "wan22_vace_modular", size(32, 32, 9, num_inference_steps=4), image=True, num_references=2
    ),
    "wan22-vace-control-modular-references": Case(
        "wan22_vace_control_modular",
        size(32, 48, 9, num_inference_steps=4),
        image=True,
        num_references=1,
    ),
    "wan22-vace-control-modular": Case(
        "wan22_vace_control_modular", size(32, 48, 9, num_inference_steps=4), image=True
    ),
    "wan22-vace-modular-momentum": _guided("wan22_vace_modular", _MOMENTUM),
    "wan22-vace-modular-interval": _guided("wan22_vace_modular", _INTERVAL),
    "wan22-vace-modular-skipped-layers": _guided("wan22_vace_modular", _SKIPPED_LAYERS),
}
