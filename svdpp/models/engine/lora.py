"""Loading LoRAs into a pipeline, by diffusers' own methods."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

from svdpp.models.checkpoint import Checkpoint
from svdpp.models.engine.call import replaced
from svdpp.models.engine.configs import library_errors
from svdpp.models.hub import show_name
from svdpp.models.lora import LoraFile


def load_loras(pipe: Any, checkpoint: Checkpoint) -> None:
    """Loads LoRAs as diffusers does; of a rank's pipeline, into the components that it holds."""
    if not checkpoint.loras:
        return
    loadable = [getattr(pipe, part, None) for part in pipe._lora_loadable_modules]
    skeletons = [module for module in loadable if getattr(module, "is_skeleton", False)]
    with ExitStack() as patches:
        patches.enter_context(warnings.catch_warnings(action="ignore"))
        for module in skeletons:
            patches.enter_context(replaced(module, load_lora_adapter=lambda *_, **__: None))
        for place, file in enumerate(checkpoint.loras):
            with library_errors(f"the LoRA {show_name(file.lora.name)}", checkpoint):
                _load_lora(pipe, file, f"lora{place}")
    names = {name for names in pipe.get_list_adapters().values() for name in names}
    weights = {f"lora{place}": file.lora.weight for place, file in enumerate(checkpoint.loras)}
    held = {name: weight for name, weight in weights.items() if name in names}
    if held:
        pipe.set_adapters(list(held), list(held.values()))


def _load_lora(pipe: Any, file: LoraFile, name: str) -> None:
    """Raises ValueError if a tensor of the file has no place; diffusers only warns of that."""
    from peft import get_peft_model_state_dict  # an extra

    source = {"weight_name": file.path.name, "local_files_only": True, "use_safetensors": True}
    expert = {"load_into_transformer_2": True} if file.part == "transformer_2" else {}
    pipe.load_lora_weights(str(file.path.parent), adapter_name=name, **source, **expert)
    denoiser = getattr(pipe, file.part)
    if getattr(denoiser, "is_skeleton", False):
        return
    tensors = pipe.lora_state_dict(str(file.path.parent), **source)
    given = {key.removeprefix("transformer.") for key in tensors if key.startswith("transformer.")}
    if name not in getattr(denoiser, "peft_config", {}):
        raise ValueError(f"none of its tensors is for a {type(denoiser).__name__}")
    known = get_peft_model_state_dict(denoiser, adapter_name=name)
    strange = sorted(key for key in given - known.keys() if ".lora_A." in key)
    if strange:
        raise ValueError(f"{strange[0]} is not in a {type(denoiser).__name__}")
