"""Small random checkpoints of Wan's and LTX-Video's classes, saved as diffusers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

_TEXT_DIM = 16
_IMAGE_DIM = 16
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


def save_tiny_wan(
    folder: Path,
    *,
    image_to_video: bool = False,
    boundary_ratio: float | None = None,
    expand_timesteps: bool = False,
    image_encoder: bool = False,
    scheduler: Any = None,
    dtype: torch.dtype = torch.float32,
    width: int = 1,
    layers: int = 1,
    z_dim: int | None = None,
    **options: Any,
) -> Path:
    """Saves a Wan pipeline with random weights to `folder`, and returns the folder.

    With a `boundary_ratio` there are two transformers, as in Wan 2.2 A14B; `expand_timesteps` is as
    in Wan 2.2 5B, and `image_encoder` as in Wan 2.1 image to video. `width` multiplies all channels
    and `options` are those of `save_pretrained`.
    """
    z_dim = z_dim or (8 if expand_timesteps else 4)
    from_image = image_to_video and not expand_timesteps
    denoiser = {
        **{**wan_sizes(width), "num_layers": layers, "out_channels": z_dim},
        **{"in_channels": 2 * z_dim + 4 if from_image else z_dim},
        **({"image_dim": _IMAGE_DIM, "added_kv_proj_dim": 24 * width} if image_encoder else {}),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text = transformers.UMT5EncoderModel(transformers.UMT5Config(**t5_sizes(width)))
        parts = {
            "tokenizer": tokenizer(),
            "text_encoder": text.to(dtype),
            "vae": wan_vae(z_dim, expand_timesteps, width),
            "scheduler": scheduler or diffusers.UniPCMultistepScheduler(**WAN_UNIPC),
            "transformer": diffusers.WanTransformer3DModel(**denoiser).to(dtype),
            "transformer_2": None,
            "boundary_ratio": boundary_ratio,
            "expand_timesteps": expand_timesteps,
        }
        if boundary_ratio is not None:
            parts["transformer_2"] = diffusers.WanTransformer3DModel(**denoiser).to(dtype)
        if from_image:
            encoder = transformers.CLIPImageProcessorPil(), _image_encoder()
            has_it = encoder if image_encoder else (None, None)
            parts |= dict(zip(("image_processor", "image_encoder"), has_it, strict=True))
    cls: Any = diffusers.WanImageToVideoPipeline if from_image else diffusers.WanPipeline
    cls(**parts).save_pretrained(folder, safe_serialization=True, **options)
    return folder


def save_tiny_ltx(
    folder: Path,
    *,
    timestep_conditioning: bool = False,
    scheduler: Any = None,
    dtype: torch.dtype = torch.float32,
    width: int = 1,
) -> Path:
    """Saves an LTX-Video pipeline with random weights to `folder`, and returns the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = diffusers.LTXPipeline(
            tokenizer=tokenizer(),
            text_encoder=transformers.T5EncoderModel(transformers.T5Config(**t5_sizes(width))).to(
                dtype
            ),
            vae=ltx_vae(timestep_conditioning, width).to(dtype),
            scheduler=scheduler or diffusers.FlowMatchEulerDiscreteScheduler(**LTX_EULER),
            transformer=ltx_transformer(width).to(dtype),
        )
    pipe.save_pretrained(folder, safe_serialization=True)
    return folder


def tokenizer() -> transformers.T5TokenizerFast:
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


def t5_sizes(width: int) -> dict[str, Any]:
    return {
        "vocab_size": 64,
        "d_model": _TEXT_DIM * width,
        "d_kv": 8,
        "d_ff": 16 * width,
        "num_layers": 1,
        "num_heads": 2 * width,
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
        **{"text_dim": _TEXT_DIM * width, "freq_dim": 16, "rope_max_seq_len": 32},
    }


def _image_encoder() -> transformers.CLIPVisionModel:
    sizes = {"hidden_size": _IMAGE_DIM, "intermediate_size": 16, "patch_size": 56}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**sizes, **layers))


def ltx_vae(timestep_conditioning: bool, width: int) -> diffusers.AutoencoderKLLTXVideo:
    halves: dict[str, Any] = {
        f"{half}{name}": sizes
        for half in ("", "decoder_")
        for name, sizes in (
            ("block_out_channels", (8 * width,) * 4),
            ("layers_per_block", (1,) * 5),
        )
    }
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, timestep_conditioning=timestep_conditioning, **halves
    )
    vae.latents_mean += 0.1 * torch.arange(8)
    vae.latents_std += 0.1 * torch.arange(8)
    return vae


def ltx_transformer(width: int) -> diffusers.LTXVideoTransformer3DModel:
    return diffusers.LTXVideoTransformer3DModel(
        **{"in_channels": 8, "out_channels": 8, "num_layers": 1},
        **{"num_attention_heads": 2 * width, "attention_head_dim": 12},
        **{"cross_attention_dim": 24 * width, "caption_channels": _TEXT_DIM * width},
    )
