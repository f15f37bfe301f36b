"""Owns small random checkpoints of the families that are rows alone, saved as diffusers does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from transformers import (
    CLIPImageProcessorPil,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from tests.models.builders import save_tiny_checkpoint
from tests.models.tiny_families import (
    WAN_UNIPC,
    ltx_transformer,
    ltx_vae,
    save_tiny_ltx,
    save_tiny_wan,
    t5_sizes,
    tokenizer,
    wan_sizes,
    wan_vae,
)

TEXT = 16
#: Sizes of the encoders of prompts, of those of images, and of denoisers.
_LLM = {"vocab_size": 300, "hidden_size": TEXT, "intermediate_size": 16, "num_attention_heads": 2}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
_DENOISER = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "num_layers": 1}
_HUNYUAN = {
    **{**_DENOISER, "attention_head_dim": 10, "num_single_layers": 1, "num_refiner_layers": 1},
    **{"text_embed_dim": TEXT, "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4)},
}
_WAN = {**wan_sizes(1), "in_channels": 16, "out_channels": 16}


def save_tiny(family: str, folder: Path, *, image: bool = False, **changes: Any) -> Path:
    """Saves a pipeline of a family with random weights to `folder`, and returns the folder."""
    if family == "wan_v2v":
        return save_tiny_wan(folder, **changes)
    if family == "wan":
        return save_tiny_wan(folder, image_to_video=image, **changes)
    if family == "ltx":
        return save_tiny_ltx(folder, **changes)
    if family == "svd":
        return save_tiny_checkpoint(folder, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        name, parts = _MAKERS[family](image)
        getattr(diffusers, name)(**{**parts, **changes}).save_pretrained(
            folder, safe_serialization=True
        )
    return folder


def _t5() -> dict[str, Any]:
    encoder = T5EncoderModel(T5Config(**t5_sizes(1)))
    return {"tokenizer": tokenizer(), "text_encoder": encoder}


def _fast_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().backend_tokenizer, **names, **options
    )


def _wan_vace(_: bool) -> tuple[str, dict[str, Any]]:
    transformer = diffusers.WanVACETransformer3DModel(
        **_WAN, num_layers=2, vace_layers=[0, 1], vace_in_channels=96
    )
    for block in transformer.vace_blocks:
        torch.nn.init.normal_(block.proj_out.weight, std=0.1)
    parts = {
        **_t5(),
        "vae": wan_vae(16),
        "transformer": transformer,
        "scheduler": UniPCMultistepScheduler(**WAN_UNIPC),
    }
    return "WanVACEPipeline", parts


def _ltx2(image: bool) -> tuple[str, dict[str, Any]]:
    text = {**_LLM, "head_dim": 8, "num_hidden_layers": 2, "num_key_value_heads": 1}
    vision = {**_VISION, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    connector = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
    audio_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4,
        output_channels=2,
        ch_mult=(1,),
        num_res_blocks=1,
        attn_resolutions=None,
        in_channels=2,
        resolution=32,
        latent_channels=2,
        norm_type="pixel",
        causality_axis="height",
        mid_block_add_attention=False,
        sample_rate=16000,
        mel_hop_length=160,
        is_causal=True,
        mel_bins=8,
    )
    parts = {
        "tokenizer": _fast_tokenizer(padding_side="left"),
        "text_encoder": Gemma3ForConditionalGeneration(config),
        "connectors": diffusers.pipelines.ltx2.LTX2TextConnectors(
            caption_channels=TEXT,
            text_proj_in_factor=3,
            **{f"video_connector_{key}": value for key, value in connector.items()},
            video_connector_num_learnable_registers=None,
            **{f"audio_connector_{key}": value for key, value in connector.items()},
            audio_connector_num_learnable_registers=None,
            connector_rope_base_seq_len=32,
            rope_double_precision=False,
            rope_type="split",
        ),
        "vae": diffusers.AutoencoderKLLTX2Video(
            latent_channels=4,
            block_out_channels=(8,),
            decoder_block_out_channels=(8,),
            layers_per_block=(1,),
            decoder_layers_per_block=(1, 1),
            spatio_temporal_scaling=(True,),
            decoder_spatio_temporal_scaling=(True,),
            decoder_inject_noise=(False, False),
            downsample_type=("spatial",),
            upsample_residual=(False,),
            upsample_factor=(1,),
            patch_size=1,
            patch_size_t=1,
            encoder_causal=True,
            decoder_causal=False,
        ),
        "audio_vae": audio_vae,
        "vocoder": diffusers.pipelines.ltx2.LTX2Vocoder(
            in_channels=16,
            hidden_channels=32,
            out_channels=2,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
            output_sampling_rate=16000,
        ),
        "transformer": diffusers.LTX2VideoTransformer3DModel(
            **{**_DENOISER, "num_layers": 2},
            attention_head_dim=8,
            cross_attention_dim=16,
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=2,
            audio_attention_head_dim=4,
            audio_cross_attention_dim=8,
            caption_channels=TEXT,
            rope_double_precision=False,
            rope_type="split",
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }
    return "LTX2ImageToVideoPipeline" if image else "LTX2Pipeline", parts


def _hunyuan_video(image: bool) -> tuple[str, dict[str, Any]]:
    llama = LlamaConfig(**_LLM, num_hidden_layers=3, pad_token_id=0)
    clip_sizes = {**_LLM, "hidden_size": 8, "num_hidden_layers": 2}
    clip = CLIPTextConfig(**clip_sizes, pad_token_id=0, eos_token_id=2)
    parts = {
        "tokenizer": _fast_tokenizer(),
        "text_encoder": LlamaModel(llama),
        "tokenizer_2": _fast_tokenizer(model_max_length=77),
        "text_encoder_2": CLIPTextModel(clip),
        "vae": diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
        ),
        "transformer": diffusers.HunyuanVideoTransformer3DModel(
            **_HUNYUAN,
            patch_size=1,
            patch_size_t=1,
            guidance_embeds=True,
            image_condition_type="token_replace" if image else None,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
    }
    if not image:
        return "HunyuanVideoPipeline", parts
    marks = ["<image>", "<|end_header_id|>"]
    parts["tokenizer"] = _fast_tokenizer(additional_special_tokens=marks)
    llava = transformers.LlavaConfig(
        vision_config=_vision(48, 2),  # the 576 patches that the pipeline expects
        text_config=llama,
        image_token_index=parts["tokenizer"].convert_tokens_to_ids("<image>"),
        pad_token_id=0,
    )
    parts["text_encoder"] = transformers.LlavaForConditionalGeneration(llava)
    parts["image_processor"] = CLIPImageProcessorPil(crop_size=48, size=48)
    return "HunyuanVideoImageToVideoPipeline", parts


def _vision(image_size: int, patch_size: int) -> CLIPVisionConfig:
    sizes = {**_VISION, "hidden_size": 4, "num_hidden_layers": 2}
    return CLIPVisionConfig(**sizes, projection_dim=4, image_size=image_size, patch_size=patch_size)


def _siglip() -> dict[str, Any]:
    sizes = {**_VISION, "hidden_size": 12, "num_hidden_layers": 1}
    config = transformers.SiglipVisionConfig(**sizes, image_size=16, patch_size=8)
    size = {"height": 16, "width": 16}
    return {
        "image_encoder": transformers.SiglipVisionModel(config),
        "feature_extractor": transformers.SiglipImageProcessorPil(size=size),
    }


def _framepack(_: bool) -> tuple[str, dict[str, Any]]:
    parts = {**_hunyuan_video(image=False)[1], **_siglip()}
    parts["transformer"] = diffusers.HunyuanVideoFramepackTransformer3DModel(
        **_HUNYUAN,
        patch_size=2,
        has_image_proj=True,
        image_proj_dim=12,
        has_clean_x_embedder=True,
    )
    return "HunyuanVideoFramepackPipeline", parts


def _qwen() -> Any:
    return transformers.Qwen2_5_VLTextConfig(
        **_LLM,
        num_hidden_layers=3,
        num_key_value_heads=2,
        rope_scaling={"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
    )


def _hunyuan_video_15(image: bool) -> tuple[str, dict[str, Any]]:
    template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    parts = {
        "tokenizer": _fast_tokenizer(chat_template=template),
        "text_encoder": transformers.Qwen2_5_VLTextModel(_qwen()),
        "tokenizer_2": transformers.ByT5Tokenizer(),
        "text_encoder_2": T5EncoderModel(T5Config(**{**t5_sizes(1), "vocab_size": 384})),
        "vae": diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(16, 16),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=2,
            downsample_match_channel=False,
            upsample_match_channel=False,
        ),
        "transformer": diffusers.HunyuanVideo15Transformer3DModel(
            **{**_DENOISER, "in_channels": 9},
            attention_head_dim=8,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            patch_size=1,
            patch_size_t=1,
            text_embed_dim=TEXT,
            text_embed_2_dim=TEXT,
            image_embed_dim=12,
            rope_axes_dim=(2, 2, 4),
            target_size=16,
        ),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=1.0),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
    }
    if image:
        return "HunyuanVideo15ImageToVideoPipeline", {**parts, **_siglip()}
    return "HunyuanVideo15Pipeline", parts


def _cogvideox(image: bool) -> tuple[str, dict[str, Any]]:
    parts = {
        **_t5(),
        "vae": diffusers.AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
        ),
        "transformer": diffusers.CogVideoXTransformer3DModel(
            **{**_DENOISER, "in_channels": 8 if image else 4},
            attention_head_dim=16,
            time_embed_dim=2,
            text_embed_dim=TEXT,
            sample_width=4,
            sample_height=4,
            sample_frames=9,
            max_text_seq_length=8,
            use_rotary_positional_embeddings=True,
        ),
        "scheduler": diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction"),
    }
    return "CogVideoXImageToVideoPipeline" if image else "CogVideoXPipeline", parts


def _skyreels_v2(image: bool) -> tuple[str, dict[str, Any]]:
    parts = {
        **_t5(),
        "vae": wan_vae(16),
        "transformer": diffusers.SkyReelsV2Transformer3DModel(
            **{**_WAN, "in_channels": 36 if image else 16},
            num_layers=1,
            image_dim=4 if image else None,
        ),
        "scheduler": UniPCMultistepScheduler(**{**WAN_UNIPC, "flow_shift": 8.0}),
    }
    if not image:
        return "SkyReelsV2Pipeline", parts
    encoder = transformers.CLIPVisionModelWithProjection(_vision(32, 8))
    processor = CLIPImageProcessorPil(crop_size=32, size=32)
    more = {"image_encoder": encoder, "image_processor": processor}
    return "SkyReelsV2ImageToVideoPipeline", {**parts, **more}


def _skyreels_v2_df(_: bool) -> tuple[str, dict[str, Any]]:
    return "SkyReelsV2DiffusionForcingPipeline", _skyreels_v2(image=False)[1]


def _kandinsky5(image: bool) -> tuple[str, dict[str, Any]]:
    parts = {
        **_hunyuan_video(image=False)[1],
        "tokenizer": _fast_tokenizer(),
        "text_encoder": transformers.Qwen2_5_VLForConditionalGeneration(
            transformers.Qwen2_5_VLConfig(
                text_config=_qwen().to_dict(),
                vision_config={
                    **{**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": TEXT},
                    **{"patch_size": 14, "fullatt_block_indexes": [0]},
                },
            )
        ),
        "transformer": diffusers.Kandinsky5Transformer3DModel(
            in_visual_dim=4,
            out_visual_dim=4,
            in_text_dim=TEXT,
            in_text_dim2=8,
            time_dim=8,
            model_dim=12,
            ff_dim=16,
            num_text_blocks=1,
            num_visual_blocks=1,
            axes_dims=(2, 2, 2),
            visual_cond=image,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
    }
    with torch.no_grad():
        for weight in parts["transformer"].parameters():
            if not weight.any():  # else the prompt has no effect
                torch.nn.init.normal_(weight, std=0.1)
    return "Kandinsky5I2VPipeline" if image else "Kandinsky5T2VPipeline", parts


def _ltx_condition(_: bool) -> tuple[str, dict[str, Any]]:
    parts = {
        **_t5(),
        "vae": ltx_vae(timestep_conditioning=True, width=1),
        "transformer": ltx_transformer(1),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }
    return "LTXConditionPipeline", parts


def _mochi(_: bool) -> tuple[str, dict[str, Any]]:
    parts = {
        **_t5(),
        "vae": diffusers.AutoencoderKLMochi(
            latent_channels=12,
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        "transformer": diffusers.MochiTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            pooled_projection_dim=16,
            text_embed_dim=TEXT,
            time_embed_dim=4,
            max_sequence_length=8,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }
    return "MochiPipeline", parts


def _latte(_: bool) -> tuple[str, dict[str, Any]]:
    parts = {
        **_t5(),
        "vae": diffusers.AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, **_BLOCKS_2D),
        "transformer": diffusers.LatteTransformer3DModel(
            sample_size=8,
            video_length=2,
            num_layers=1,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            caption_channels=TEXT,
            in_channels=4,
            cross_attention_dim=24,
            out_channels=8,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
        ),
        "scheduler": diffusers.DDIMScheduler(),
    }
    return "LattePipeline", parts


_BLOCKS_2D = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
_MAKERS: Mapping[str, Callable[[bool], tuple[str, dict[str, Any]]]] = {
    "wan_vace": _wan_vace,
    "ltx2": _ltx2,
    "hunyuan_video": _hunyuan_video,
    "framepack": _framepack,
    "hunyuan_video_15": _hunyuan_video_15,
    "cogvideox": _cogvideox,
    "wan_vace_control": _wan_vace,
    "cogvideox_v2v": lambda _: _cogvideox(image=False),
    "skyreels_v2": _skyreels_v2,
    "skyreels_v2_df": _skyreels_v2_df,
    "kandinsky5": _kandinsky5,
    "ltx_condition": _ltx_condition,
    "mochi": _mochi,
    "latte": _latte,
}
