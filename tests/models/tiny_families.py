"""Small random checkpoints of every family, saved as diffusers does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from svdpp.config import ModelConfig
from svdpp.config.families.registry import FAMILY_SPECS
from svdpp.models.checkpoint import find_checkpoint

Parts = dict[str, Any]

_OPTIONS = {"max_shard_size", "variant"}
TEXT = 16
_SENTENCES = ["a cat walks over the grass", "the sea at night", "blurred, static, worst quality"]

#: Config of the published Wan 2.2 (Wan-AI/Wan2.2-T2V-A14B-Diffusers).
WAN_UNIPC = {
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
    "solver_order": 2,
}
#: Config of the published LTX-Video (Lightricks/LTX-Video).
LTX_EULER = {
    "base_image_seq_len": 1024,
    "base_shift": 0.95,
    "max_image_seq_len": 4096,
    "max_shift": 2.05,
    "shift_terminal": 0.1,
    "use_dynamic_shifting": True,
}
#: Sizes of the encoders of prompts, of those of images, and of denoisers.
_LLM = {"vocab_size": 300, "hidden_size": TEXT, "intermediate_size": 16, "num_attention_heads": 2}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
_DENOISER = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "num_layers": 1}
_HUNYUAN = {
    **{**_DENOISER, "attention_head_dim": 10, "num_single_layers": 1, "num_refiner_layers": 1},
    **{"text_embed_dim": TEXT, "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4)},
}


def save_tiny(family: str, folder: Path, *, image: bool = False, **changes: Any) -> Path:
    """Saves a pipeline of a family with random weights to `folder`, and returns the folder.

    `changes` are options of `save_pretrained`, and components; of Wan, LTX and SVD, options of the
    functions that make those.
    """
    options = {name: changes.pop(name) for name in _OPTIONS & changes.keys()}
    if family.endswith("_v2v"):
        family, image = family.removesuffix("_v2v"), False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if family in ("svd", "wan", "ltx"):
            image = image and not changes.get("expand_timesteps")
            parts = _PARTS[family](image, **changes)
        else:
            parts = {**_PARTS[family](image), **changes}
        spec = FAMILY_SPECS[family]
        pipeline: Any = getattr(diffusers, spec.pipeline(image or spec.text_pipeline is None))
        pipeline(**parts).save_pretrained(folder, safe_serialization=True, **options)
    _name_published_classes(folder, family)
    return folder


def _name_published_classes(folder: Path, family: str) -> None:
    """Names classes in `model_index.json` as published checkpoints do.

    Without torchvision, transformers has neither these image processors, whose place others take,
    nor Kandinsky's processor, which cannot be made here.
    """
    path = folder / "model_index.json"
    index = json.loads(path.read_text())
    for part, entry in index.items():
        if isinstance(entry, list) and str(entry[1]).endswith("ProcessorPil"):
            index[part] = [entry[0], entry[1].removesuffix("Pil")]
    if family == "kandinsky5":
        index["tokenizer"] = ["transformers", "Qwen2VLProcessor"]
        image = {"image_processor_type": "Qwen2VLImageProcessor"}
        (folder / "tokenizer" / "preprocessor_config.json").write_text(json.dumps(image))
    path.write_text(json.dumps(index))


save_tiny_wan = partial(save_tiny, "wan")
save_tiny_ltx = partial(save_tiny, "ltx")


def _svd(_: bool, *, vae_factor: int = 8, num_frames: int = 4) -> Parts:
    """SVD; `vae_factor` is 8, 4 or 2 pixels per latent cell."""
    num_blocks = {8: 4, 4: 3, 2: 2}[vae_factor]
    vision = {"hidden_size": 16, "intermediate_size": 16, "projection_dim": 16}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 56}
    return {
        "vae": diffusers.AutoencoderKLTemporalDecoder(
            down_block_types=("DownEncoderBlock2D",) * num_blocks,
            block_out_channels=(32,) * num_blocks,  # GroupNorm has 32 groups
        ),
        "image_encoder": transformers.CLIPVisionModelWithProjection(
            transformers.CLIPVisionConfig(**vision, **layers)
        ),
        "unet": diffusers.UNetSpatioTemporalConditionModel(
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            **{"sample_size": 8, "num_frames": num_frames, "layers_per_block": 1},
            **{"block_out_channels": (32, 32), "num_attention_heads": (2, 2)},
            **{"addition_time_embed_dim": 32, "projection_class_embeddings_input_dim": 96},
            cross_attention_dim=16,
        ),
        "scheduler": svd_scheduler(),
        "feature_extractor": transformers.CLIPImageProcessorPil(),
    }


def svd_scheduler() -> diffusers.EulerDiscreteScheduler:
    """That of the published SVD (stabilityai/stable-video-diffusion-img2vid-xt)."""
    published = find_checkpoint(ModelConfig(), weights=False).folder
    return diffusers.EulerDiscreteScheduler.from_pretrained(published, subfolder="scheduler")


def _tokenizer() -> transformers.T5TokenizerFast:
    """A tokenizer with a vocabulary of a few words."""
    special = ["<pad>", "</s>", "<unk>"]
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()  # as in T5's own tokenizer
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(_SENTENCES, trainer)
    vocabulary = json.loads(trained.to_str())["model"]["vocab"]
    return transformers.T5TokenizerFast(
        vocab=[(token, score) for token, score in vocabulary], extra_ids=0
    )


def _letters(kind: str, *special: str, **options: Any) -> Any:
    """A tokenizer of a class of transformers, whose tokens are letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*special, "\u0120", "\u2581", *letters, *(f"{each}</w>" for each in letters)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return getattr(transformers, kind)(vocab=vocabulary, merges=[], **options)


def _llama_tokenizer(**options: Any) -> Any:
    return _letters("LlamaTokenizerFast", "<pad>", "<s>", "</s>", pad_token="<pad>", **options)


def _clip_tokenizer() -> Any:
    return _letters("CLIPTokenizer", "<|startoftext|>", "<|endoftext|>", model_max_length=77)


def _qwen_tokenizer(**options: Any) -> Any:
    return _letters("Qwen2Tokenizer", "<|endoftext|>", **options)


def _t5(width: int = 1, kind: str = "T5", dtype: torch.dtype = torch.float32) -> Parts:
    config = getattr(transformers, f"{kind}Config")(**_t5_sizes(width))
    encoder = getattr(transformers, f"{kind}EncoderModel")(config)
    return {"tokenizer": _tokenizer(), "text_encoder": encoder.to(dtype)}


def _t5_sizes(width: int) -> dict[str, Any]:
    return {
        "vocab_size": 64,
        "d_model": TEXT * width,
        "d_kv": 8,
        "d_ff": 16 * width,
        "num_layers": 1,
        "num_heads": 2 * width,
    }


def _wan(
    image: bool,
    *,
    boundary_ratio: float | None = None,
    expand_timesteps: bool = False,
    image_encoder: bool = False,
    scheduler: Any = None,
    dtype: torch.dtype = torch.float32,
    width: int = 1,
    layers: int = 1,
) -> Parts:
    """Wan; with a `boundary_ratio` there are two transformers, as in Wan 2.2 A14B.

    `expand_timesteps` is as in Wan 2.2 5B, and `image_encoder` as in Wan 2.1 image to video.
    `width` multiplies all channels.
    """
    z_dim = 8 if expand_timesteps else 4
    denoiser = {
        **{**_wan_sizes(width), "num_layers": layers, "out_channels": z_dim},
        **{"in_channels": 2 * z_dim + 4 if image else z_dim},
        **({"image_dim": 4, "added_kv_proj_dim": 24 * width} if image_encoder else {}),
    }
    # In this order, on which the weights depend, and so the clips in tests/golden.
    parts = {
        **_t5(width, "UMT5", dtype),
        "vae": _wan_vae(z_dim, expand_timesteps, width),
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
        return parts | _clip_vision(transformers.CLIPVisionModel, 32)
    return {**parts, "image_processor": None, "image_encoder": None}


def _like_wan(transformer: Any, **changes: float) -> Parts:
    scheduler = UniPCMultistepScheduler(**{**WAN_UNIPC, **changes})
    return {
        **_t5(kind="UMT5"),
        "vae": _wan_vae(16),
        "transformer": transformer,
        "scheduler": scheduler,
    }


def _wan_vae(z_dim: int, residual: bool = False, width: int = 1) -> diffusers.AutoencoderKLWan:
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


def _wan_sizes(width: int) -> dict[str, Any]:
    return {
        **{"num_attention_heads": 2 * width, "attention_head_dim": 12, "ffn_dim": 24 * width},
        **{"text_dim": TEXT * width, "freq_dim": 16, "rope_max_seq_len": 32},
    }


def _ltx(
    _: bool,
    *,
    timestep_conditioning: bool = False,
    scheduler: Any = None,
    dtype: torch.dtype = torch.float32,
) -> Parts:
    text, halves = _t5(dtype=dtype), ("", "decoder_")  # in this order, as Wan's
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


def _clip_vision(kind: type[Any], image_size: int) -> Parts:
    return {
        "image_encoder": kind(_vision(image_size, 8)),
        "image_processor": transformers.CLIPImageProcessorPil(
            crop_size=image_size, size=image_size
        ),
    }


def _wan_vace(_: bool) -> Parts:
    sizes = {**_wan_sizes(1), "num_layers": 2, "vace_layers": [0, 1]}
    transformer = diffusers.WanVACETransformer3DModel(**sizes)
    for block in transformer.vace_blocks:
        torch.nn.init.normal_(block.proj_out.weight, std=0.1)
    return _like_wan(transformer)


def _wan_animate(_: bool) -> Parts:
    motion = {"size": 16, "dim": 8, "channel_sizes": {"4": 8, "8": 8, "16": 8}}
    transformer = diffusers.WanAnimateTransformer3DModel(
        **{**_wan_sizes(1), "num_layers": 2, "image_dim": 4, "added_kv_proj_dim": 24},
        **{f"motion_encoder_{name}": size for name, size in motion.items()},
        **{"motion_style_dim": 8, "motion_dim": 4, "inject_face_latents_blocks": 1},
        **{"face_encoder_hidden_dim": 8, "face_encoder_num_heads": 2},
    )
    return _like_wan(transformer) | _clip_vision(transformers.CLIPVisionModel, 16)


def _ltx2(_: bool) -> Parts:
    text = {**_LLM, "head_dim": 8, "num_hidden_layers": 2, "num_key_value_heads": 1}
    vision = {**_VISION, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
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
        "tokenizer": _letters(
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
            **{"decoder_inject_noise": (False, False), "downsample_type": ("spatial",)},
            **{"upsample_residual": (False,), "upsample_factor": (1,)},
            **{"patch_size": 1, "decoder_causal": False},
        ),
        "audio_vae": audio_vae,
        "vocoder": diffusers.pipelines.ltx2.LTX2Vocoder(
            **{"in_channels": 16, "hidden_channels": 32, "output_sampling_rate": 16000},
            **{"upsample_kernel_sizes": [4, 4], "upsample_factors": [2, 2]},
            **{"resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3, 5]]},
        ),
        "transformer": diffusers.LTX2VideoTransformer3DModel(
            **{**_DENOISER, **head, "num_layers": 2, "cross_attention_dim": 16},
            **{"audio_in_channels": 4, "audio_out_channels": 4, "audio_cross_attention_dim": 8},
            **{"audio_num_attention_heads": 2, "audio_attention_head_dim": 4},
            **{"caption_channels": TEXT, **rope},
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }


def _hunyuan_video(image: bool) -> Parts:
    llama = transformers.LlamaConfig(**_LLM, num_hidden_layers=3, pad_token_id=0)
    clip_sizes = {**_LLM, "hidden_size": 8, "num_hidden_layers": 2}
    clip = transformers.CLIPTextConfig(**clip_sizes, pad_token_id=0, eos_token_id=2)
    parts = {
        "tokenizer": _llama_tokenizer(),
        "text_encoder": transformers.LlamaModel(llama),
        "tokenizer_2": _clip_tokenizer(),
        "text_encoder_2": transformers.CLIPTextModel(clip),
        "vae": diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=4
        ),
        "transformer": diffusers.HunyuanVideoTransformer3DModel(
            **_HUNYUAN, patch_size=1, image_condition_type="token_replace" if image else None
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
    }
    if not image:
        return parts
    marks = ["<image>", "<|end_header_id|>"]
    parts["tokenizer"] = _llama_tokenizer(additional_special_tokens=marks)
    llava = transformers.LlavaConfig(
        vision_config=_vision(48, 2),  # the 576 patches that the pipeline expects
        text_config=llama,
        image_token_index=parts["tokenizer"].convert_tokens_to_ids("<image>"),
        pad_token_id=0,
    )
    parts["text_encoder"] = transformers.LlavaForConditionalGeneration(llava)
    parts["image_processor"] = transformers.CLIPImageProcessorPil(crop_size=48, size=48)
    return parts


def _vision(image_size: int, patch_size: int) -> transformers.CLIPVisionConfig:
    sizes = {**_VISION, "hidden_size": 4, "num_hidden_layers": 2}
    return transformers.CLIPVisionConfig(
        **sizes, projection_dim=4, image_size=image_size, patch_size=patch_size
    )


def _siglip() -> Parts:
    sizes = {**_VISION, "hidden_size": 12, "num_hidden_layers": 1}
    config = transformers.SiglipVisionConfig(**sizes, image_size=16, patch_size=8)
    size = {"height": 16, "width": 16}
    return {
        "image_encoder": transformers.SiglipVisionModel(config),
        "feature_extractor": transformers.SiglipImageProcessorPil(size=size),
    }


def _framepack(_: bool) -> Parts:
    parts = {**_hunyuan_video(image=False), **_siglip()}
    parts["transformer"] = diffusers.HunyuanVideoFramepackTransformer3DModel(
        **_HUNYUAN, has_image_proj=True, image_proj_dim=12, has_clean_x_embedder=True
    )
    return parts


def _qwen() -> Any:
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"}
    layers = {"num_hidden_layers": 3, "num_key_value_heads": 2}
    return transformers.Qwen2_5_VLTextConfig(**_LLM, **layers, rope_scaling=rope)


def _hunyuan_video_15(image: bool) -> Parts:
    template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    parts = {
        "tokenizer": _qwen_tokenizer(chat_template=template),
        "text_encoder": transformers.Qwen2_5_VLTextModel(_qwen()),
        "tokenizer_2": transformers.ByT5Tokenizer(),
        "text_encoder_2": transformers.T5EncoderModel(
            transformers.T5Config(**{**_t5_sizes(1), "vocab_size": 384})
        ),
        "vae": diffusers.AutoencoderKLHunyuanVideo15(
            **{"latent_channels": 4, "block_out_channels": (16, 16), "layers_per_block": 1},
            **{"spatial_compression_ratio": 4, "temporal_compression_ratio": 2},
            **{"downsample_match_channel": False, "upsample_match_channel": False},
        ),
        "transformer": diffusers.HunyuanVideo15Transformer3DModel(
            **{**_DENOISER, "in_channels": 9, "attention_head_dim": 8, "num_refiner_layers": 1},
            **{"mlp_ratio": 2.0, "text_embed_dim": TEXT, "text_embed_2_dim": TEXT},
            **{"image_embed_dim": 12, "rope_axes_dim": (2, 2, 4), "target_size": 16},
        ),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=1.0),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
    }
    return {**parts, **_siglip()} if image else parts


def _cogvideox(image: bool) -> Parts:
    return {
        **_t5(),
        "vae": diffusers.AutoencoderKLCogVideoX(
            block_out_channels=(8,) * 4, latent_channels=4, layers_per_block=1, norm_num_groups=2
        ),
        "transformer": diffusers.CogVideoXTransformer3DModel(
            **{**_DENOISER, "in_channels": 8 if image else 4, "attention_head_dim": 16},
            **{"time_embed_dim": 2, "text_embed_dim": TEXT, "max_text_seq_length": 8},
            **{"sample_width": 4, "sample_height": 4, "sample_frames": 9},
            use_rotary_positional_embeddings=True,
        ),
        "scheduler": diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction"),
    }


def _skyreels_v2(image: bool) -> Parts:
    sizes = {**_wan_sizes(1), "num_layers": 1, "in_channels": 36 if image else 16}
    if image:
        sizes["image_dim"] = 4
    parts = _like_wan(diffusers.SkyReelsV2Transformer3DModel(**sizes), flow_shift=8.0)
    encoder = transformers.CLIPVisionModelWithProjection
    return parts | _clip_vision(encoder, 32) if image else parts


def _kandinsky5(image: bool) -> Parts:
    parts = {
        **_hunyuan_video(image=False),
        "tokenizer": _qwen_tokenizer(),
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
            **{"in_text_dim": TEXT, "in_text_dim2": 8, "time_dim": 8, "model_dim": 12},
            **{"ff_dim": 16, "num_text_blocks": 1, "num_visual_blocks": 1},
            **{"axes_dims": (2, 2, 2), "visual_cond": image},
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
    }
    with torch.no_grad():
        for weight in parts["transformer"].parameters():
            if not weight.any():  # else the prompt has no effect
                torch.nn.init.normal_(weight, std=0.1)
    return parts


def _ltx_condition(image: bool) -> Parts:
    plain = FlowMatchEulerDiscreteScheduler()
    return _ltx(image, timestep_conditioning=True, scheduler=plain)


def _mochi(_: bool) -> Parts:
    return {
        **_t5(),
        "vae": diffusers.AutoencoderKLMochi(
            **{f"{half}_block_out_channels": (32,) * 4 for half in ("encoder", "decoder")},
            layers_per_block=(1,) * 5,
        ),
        "transformer": diffusers.MochiTransformer3DModel(
            **{"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2},
            **{"pooled_projection_dim": 16, "text_embed_dim": TEXT, "time_embed_dim": 4},
            max_sequence_length=8,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }


def _latte(_: bool) -> Parts:
    return {
        **_t5(),
        "vae": diffusers.AutoencoderKL(
            **{"block_out_channels": (8, 8), "norm_num_groups": 4},
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        ),
        "transformer": diffusers.LatteTransformer3DModel(
            **{"sample_size": 8, "video_length": 2, "patch_size": 2, "attention_bias": True},
            **{"attention_head_dim": 8, "num_attention_heads": 3, "cross_attention_dim": 24},
            **{"caption_channels": TEXT, "in_channels": 4, "out_channels": 8},
            **{"activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000},
            **{"norm_type": "ada_norm_single", "norm_elementwise_affine": False},
        ),
        "scheduler": diffusers.DDIMScheduler(),
    }


_PARTS: Mapping[str, Callable[..., Parts]] = {
    "svd": _svd,
    "wan": _wan,
    "ltx": _ltx,
    "wan_vace": _wan_vace,
    "wan_animate": _wan_animate,
    "wan_replace": _wan_animate,
    "ltx2": _ltx2,
    "hunyuan_video": _hunyuan_video,
    "framepack": _framepack,
    "hunyuan_video_15": _hunyuan_video_15,
    "cogvideox": _cogvideox,
    "wan_vace_control": _wan_vace,
    "skyreels_v2": _skyreels_v2,
    "skyreels_v2_df": _skyreels_v2,
    "kandinsky5": _kandinsky5,
    "ltx_condition": _ltx_condition,
    "mochi": _mochi,
    "latte": _latte,
}
