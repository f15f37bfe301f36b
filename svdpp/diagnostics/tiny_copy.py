"""A tiny copy of a checkpoint: its configs with small sizes, and random weights.

The classes, the scheduler, the tokenizers and all switches are the checkpoint's own. Sizes that are
equal in two components stay equal, because a key has the same limit in all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from svdpp.config import SamplingConfig
from svdpp.errors import RequestError
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.engine.load import component_class, silence_libraries

#: Steps of the tiny copy's clips.
NUM_STEPS = 4
_SIDE, _FRAMES = 64, 16

_WIDTH = 64
#: The largest values of sizes, by the pattern of their names.
_LIMITS = (
    (1, r"num_(single_layers|refiner_layers|res_blocks|key_value_heads|text_blocks)|depth"),
    (1, "inject_face_latents_blocks"),
    (1, r"(video|audio)_connector_num_layers|(decoder_)?layers_per_block|ch_mult"),
    (2, r"(num|n|num_decoder)_layers|num_(heads|visual_blocks|attention_heads)"),
    (2, r"(audio|(video|audio)_connector)_num_attention_heads"),
    (3, "num_hidden_layers"),  # encoders of prompts give the third last of their hidden states,
    (4, "text_proj_in_factor"),  # or all of them at once
    (_SIDE // 8, "(decoder_)?base_dim|sample_(height|width)|motion_encoder_size"),
    (9, "sample_frames"),
    (_WIDTH // 2, "((video|audio)_connector_attention_)?head_dim"),
    (_WIDTH, r"hidden_(size|channels)|d_model|caption_channels|(pooled_)?projection_dim"),
    (_WIDTH, r"(text|image|cross_attention|text_embed|text_embed_2)_dim|in_text_dim2?"),
    (_WIDTH, r"motion_(style|encoder)_dim|face_encoder_hidden_dim"),
    (_WIDTH, r"out_hidden_size|d_ff|(ff|ffn)_dim|intermediate_size|target_size"),
    (2 * _WIDTH, "model_dim"),
)
_ALL_ONE = ("layers_per_block", "decoder_layers_per_block", "ch_mult")
_ROTARY_SECTIONS = [4, 6, 6]
# Most normalise groups of channels, of which there are 32.
_WITHOUT_GROUPS = ("AutoencoderKLHunyuanVideo15", "AutoencoderKLLTX2Video")
_WIDTHS_OF_HEADS = ("cross_attention_dim", "added_kv_proj_dim")


def write_tiny_copy(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes the tiny copy of a checked checkpoint to an empty folder, a few megabytes."""
    silence_libraries()
    index = json.loads((checkpoint.folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for part in checkpoint.folder.iterdir():
            if part.name in checkpoint.weighted and index.get(part.name, [None])[0]:
                config = json.loads((part / "config.json").read_text())
                cls = component_class(part.name, index[part.name][1])
                _new(cls, tiny(config)).save_pretrained(folder / part.name)
            elif part.is_dir() and part.name in index:
                shutil.copytree(part, folder / part.name)


def tiny_sampling(checkpoint: Checkpoint, sampling: SamplingConfig) -> SamplingConfig:
    """The first small clip of the kind of `sampling` that the tiny copy `checkpoint` can make."""
    unit, frames = sampling.side_unit, sampling.frames_unit
    known = {each.name for each in fields(sampling) if each.init}
    kind: Any = type(sampling)
    for side, number in itertools.product((_SIDE, _SIDE // 2, _SIDE // 4), range(1, 1 + _FRAMES)):
        rounded = unit * -(-side // unit)
        wanted = {
            **{"num_inference_steps": NUM_STEPS, "height": rounded, "width": rounded},
            **{"num_frames": frames * number + 1, "stg_block": 1},
            "from_image": getattr(sampling, "from_image", None),
        }
        with contextlib.suppress(RequestError):
            found: SamplingConfig = kind(**{key: wanted[key] for key in wanted if key in known})
            return checkpoint.resolve(found)
    raise RequestError(f"{checkpoint.label} makes no small clip")


def tiny(config: Mapping[str, Any]) -> dict[str, Any]:
    """A component's config with small sizes."""
    small = {key: _limited(key, value) for key, value in config.items()}
    unit = 8 if config.get("_class_name") in _WITHOUT_GROUPS else 32
    for key, value in config.items():
        if key.endswith("block_out_channels"):
            small[key] = _with_smallest(unit, value)
    if isinstance(types := small.get("layer_types"), list):
        small["layer_types"] = types[: small["num_hidden_layers"]]
    for prefix in ("", "audio_"):
        names = f"{prefix}num_attention_heads", f"{prefix}attention_head_dim"
        heads, size = (config.get(name) for name in names)
        if not (isinstance(heads, int) and isinstance(size, int)):
            continue
        for key in (prefix + name for name in _WIDTHS_OF_HEADS):
            if config.get(key) == heads * size:
                small[key] = small[names[0]] * small[names[1]]
    return small


def _limited(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return tiny(value)
    if isinstance(value, list):
        if key == "num_attention_heads":
            return _with_smallest(1, value)
        if key == "mrope_section":
            return [min(pair) for pair in zip(value, _ROTARY_SECTIONS, strict=True)]
        return [1] * len(value) if key in _ALL_ONE else value
    limits = (limit for limit, names in _LIMITS if re.fullmatch(names, key))
    return min(value, next(limits, value)) if isinstance(value, int) else value


def _with_smallest(unit: int, value: list[int]) -> list[int]:
    """Multiples of `unit` with about the ratios of `value`, whose smallest one becomes `unit`."""
    divisor = max(1, min(value) // unit)
    return value if divisor == 1 else [max(unit, v // divisor // unit * unit) for v in value]


def _new(cls: Any, config: Mapping[str, Any]) -> Any:
    if hasattr(cls, "from_config") and cls.__module__.startswith("diffusers"):
        return cls.from_config(config)
    return cls(cls.config_class.from_dict(config))
