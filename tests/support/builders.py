"""Builders of test data: tiny checkpoints, small configurations, LoRA files, edited JSON files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from peft import LoraConfig, get_peft_model_state_dict

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling, sampling_defaults
from tests.support.tiny_families import save_tiny

save_tiny_checkpoint = partial(save_tiny, "svd")


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file. A key whose value is None is removed."""
    removed = {key for key, value in changes.items() if value is None}
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: values[key] for key in values if key not in removed}))


def small_svd(world_size: int, *, steps: int = 6, **changes: Any) -> PipelineConfig:
    """Return a configuration of the demo model on `world_size` ranks: two frames of 64 x 64."""
    values = {**sampling_defaults("demo"), "height": 64, "width": 64, "num_frames": 2}
    return PipelineConfig(
        world_size=world_size,
        model=ModelConfig(name="demo"),
        sampling=SvdSampling(num_inference_steps=steps, **values),
        **changes,
    )


def save_tiny_lora(checkpoint: Path, file: Path, *, part: str = "transformer", seed: int) -> Path:
    """Save a random LoRA for the denoiser `part` of `checkpoint` as `file`, and return the path."""
    index = json.loads((checkpoint / "model_index.json").read_text())
    model = getattr(diffusers, index[part][1]).from_pretrained(checkpoint / part)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=targets))
        for name, parameter in model.named_parameters():
            # PEFT initialises these weights with zeros, with which the LoRA would have no effect.
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    getattr(diffusers, index["_class_name"]).save_lora_weights(
        file.parent,
        transformer_lora_layers=get_peft_model_state_dict(model),
        weight_name=file.name,
        transformer_lora_adapter_metadata=model.peft_config["default"].to_dict(),
    )
    return file
