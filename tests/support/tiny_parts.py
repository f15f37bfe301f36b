"""Components that the tiny checkpoints of several families share."""

from __future__ import annotations

import json
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

Parts = dict[str, Any]

TEXT = 16
_SENTENCES = ["a cat walks over the grass", "the sea at night", "blurred, static, worst quality"]

#: Config values that make text encoders, image encoders and denoisers tiny.
LLM = {"vocab_size": 300, "hidden_size": TEXT, "intermediate_size": 16, "num_attention_heads": 2}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
DENOISER = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "num_layers": 1}


def tokenizer() -> transformers.T5TokenizerFast:
    """Return a T5 tokenizer with a vocabulary of a few words, for tiny checkpoints."""
    special = ["<pad>", "</s>", "<unk>"]
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()  # as in the tokenizer of T5
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(_SENTENCES, trainer)
    vocabulary = json.loads(trained.to_str())["model"]["vocab"]
    return transformers.T5TokenizerFast(
        vocab=[(token, score) for token, score in vocabulary], extra_ids=0
    )


def letters(kind: str, *special: str, **options: Any) -> Any:
    """Return a tokenizer of a transformers class for tiny checkpoints: tokens are letters."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*special, "\u0120", "\u2581", *letters, *(f"{each}</w>" for each in letters)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return getattr(transformers, kind)(vocab=vocabulary, merges=[], **options)


def llama_tokenizer(**options: Any) -> Any:
    return letters("LlamaTokenizerFast", "<pad>", "<s>", "</s>", pad_token="<pad>", **options)


def clip_tokenizer() -> Any:
    return letters("CLIPTokenizer", "<|startoftext|>", "<|endoftext|>", model_max_length=77)


def qwen_tokenizer(**options: Any) -> Any:
    return letters("Qwen2Tokenizer", "<|endoftext|>", **options)


def t5(width: int = 1, kind: str = "T5", dtype: torch.dtype = torch.float32) -> Parts:
    config = getattr(transformers, f"{kind}Config")(**t5_sizes(width))
    encoder = getattr(transformers, f"{kind}EncoderModel")(config)
    return {"tokenizer": tokenizer(), "text_encoder": encoder.to(dtype)}


def t5_sizes(width: int) -> dict[str, Any]:
    return {
        "vocab_size": 64,
        "d_model": TEXT * width,
        "d_kv": 8,
        "d_ff": 16 * width,
        "num_layers": 1,
        "num_heads": 2 * width,
    }


#: Number of tokens that `clip_vision` returns for an image of 32 pixels: 4 x 4 patches, and the
#: class token.
VISION_TOKENS = 17


def clip_vision(kind: type[Any], image_size: int) -> Parts:
    return {
        "image_encoder": kind(vision(image_size, 8)),
        "image_processor": transformers.CLIPImageProcessorPil(
            crop_size=image_size, size=image_size
        ),
    }


def vision(image_size: int, patch_size: int) -> transformers.CLIPVisionConfig:
    sizes = {**VISION, "hidden_size": 4, "num_hidden_layers": 2}
    return transformers.CLIPVisionConfig(
        **sizes, projection_dim=4, image_size=image_size, patch_size=patch_size
    )


def siglip() -> Parts:
    sizes = {**VISION, "hidden_size": 12, "num_hidden_layers": 1}
    config = transformers.SiglipVisionConfig(**sizes, image_size=16, patch_size=8)
    size = {"height": 16, "width": 16}
    return {
        "image_encoder": transformers.SiglipVisionModel(config),
        "feature_extractor": transformers.SiglipImageProcessorPil(size=size),
    }


def qwen() -> Any:
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"}
    layers = {"num_hidden_layers": 3, "num_key_value_heads": 2}
    return transformers.Qwen2_5_VLTextConfig(**LLM, **layers, rope_scaling=rope)


def rebuild(part: Any, changes: Parts) -> Any:
    """Return a new component of the same class, with other config values and new weights.

    Weight matrices that are all zero become random, because a layer with zero weights has no
    effect.

    Args:
        part: Model, scheduler or guider.
        changes: New values by config key; a mapping changes values of a nested config.
    """
    if isinstance(part, transformers.PreTrainedModel):
        config = type(part.config)(**_merged(part.config.to_dict(), changes))
        made = type(part)(config)
    else:
        values = {**part.config, **changes}
        values.pop("_use_default_values", None)  # keys whose values diffusers would ignore
        made = type(part).from_config(values)
    for weight in made.parameters() if isinstance(made, torch.nn.Module) else ():
        if weight.ndim > 1 and not weight.any():
            torch.nn.init.normal_(weight, std=0.1)
    return made


def _merged(values: Parts, changes: Parts) -> Parts:
    return values | {
        key: _merged(values[key], value) if isinstance(value, dict) and key in values else value
        for key, value in changes.items()
    }
