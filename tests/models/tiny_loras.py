"""Owns small random LoRAs of tiny checkpoints, saved as diffusers does."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import torch
from peft import LoraConfig, get_peft_model_state_dict


def save_tiny_lora(checkpoint: Path, file: Path, *, part: str = "transformer", seed: int) -> Path:
    """Saves a LoRA of one denoiser of `checkpoint` as `file`, and returns its path."""
    index = json.loads((checkpoint / "model_index.json").read_text())
    model = getattr(diffusers, index[part][1]).from_pretrained(checkpoint / part)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=targets))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros, before training
                torch.nn.init.normal_(parameter)
    getattr(diffusers, index["_class_name"]).save_lora_weights(
        file.parent,
        transformer_lora_layers=get_peft_model_state_dict(model),
        weight_name=file.name,
        transformer_lora_adapter_metadata=model.peft_config["default"].to_dict(),
    )
    return file
