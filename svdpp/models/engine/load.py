"""Loading a pipeline for one rank: its own components, and skeletons of the others."""

from __future__ import annotations

import functools
import importlib
import warnings
from contextlib import ExitStack
from typing import Any

import diffusers
import torch

from svdpp.config import ModelConfig
from svdpp.models.base import DTYPES
from svdpp.models.checkpoint import Checkpoint, has_weights
from svdpp.models.engine.configs import library_errors
from svdpp.models.engine.patches import replaced
from svdpp.models.engine.rows import ROWS
from svdpp.models.hub import show_name
from svdpp.models.loading import (
    load_module,
    load_processor,
    new_module,
    silence_libraries,
)
from svdpp.models.lora import LoraFile
from svdpp.plan.layout import Roles

#: Where the classes of components are; LTX-2 has some beside its pipelines.
_LIBRARIES = ("diffusers", "transformers", "diffusers.pipelines.ltx2")
#: Submodules of VAEs that are used by an encode of images alone, and by a decode.
_ONLY_ENCODE, _ONLY_DECODE = ("encoder", "quant_conv"), ("decoder", "post_quant_conv")


def preload(family: str) -> None:
    """Imports diffusers' pipelines of a family, and with them its other classes."""
    silence_libraries()
    for name in (ROWS[family].text, ROWS[family].image):
        if name is not None:
            getattr(diffusers, name)


def load_pipeline(
    checkpoint: Checkpoint, model: ModelConfig, *, sampling: Any, roles: Roles, device: str
) -> Any:
    """The pipeline of a rank with these roles; components of other ranks are skeletons."""
    silence_libraries()
    place, needed = torch.device(device), checkpoint.parts_of(roles, sampling)
    parts: dict[str, Any] = {}
    for part, name in checkpoint.classes:
        cls, dtype = component_class(part, name), dtype_of(checkpoint, part, model.dtype)
        if not has_weights(part):
            parts[part] = load_processor(checkpoint, part, cls) if part in needed else None
        elif part in needed:
            module = parts[part] = load_module(checkpoint, part, cls, dtype, place)
            for unused in module._modules.keys() & unused_parts(checkpoint, part, roles, sampling):
                delattr(module, unused)
            apply_memory_options(checkpoint, part, module, model)
        else:
            parts[part] = skeleton(cls, checkpoint, part, dtype, place)
    pipe = new_pipeline(checkpoint, sampling.from_image, parts, place)
    load_loras(pipe, checkpoint)
    return pipe


def conditions(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the bits depend on besides request and device: the class of SVD's image processor."""
    return {
        part: component_class(part, name).__name__
        for part, name in checkpoint.classes
        if part == "feature_extractor"
    }


def new_pipeline(
    checkpoint: Checkpoint, from_image: bool, parts: dict[str, Any], device: torch.device
) -> Any:
    """The pipeline with these components, on `device` even if its first one is a skeleton."""
    cls = getattr(diffusers, checkpoint.row.pipeline(from_image))
    own = {**parts, "scheduler": checkpoint.new_scheduler(None)}
    with library_errors("the pipeline", checkpoint):
        pipe = cls.from_pretrained(checkpoint.folder, local_files_only=True, **own)
    pipe.set_progress_bar_config(disable=True)
    pipe.__class__ = _on_device(cls, str(device))
    return pipe


def set_up(pipe: Any, checkpoint: Checkpoint, sampling: Any) -> None:
    """Gives the pipeline the scheduler of a clip, and its guider, if it has one, the scale."""
    pipe.scheduler = checkpoint.new_scheduler(sampling)
    if (guider := getattr(pipe, "guider", None)) is not None:
        scale = {"guidance_scale": sampling.guidance_scale}
        pipe.guider = type(guider).from_config({**guider.config, **scale})


def component_class(part: str, name: str) -> Any:
    """The class of a component, of diffusers or transformers."""
    name = "CLIPImageProcessor" if name == "CLIPFeatureExtractor" else name  # as diffusers
    with library_errors(part):
        found = (importlib.import_module(library) for library in _LIBRARIES)
        return next(getattr(library, name) for library in found if hasattr(library, name))


def apply_memory_options(
    checkpoint: Checkpoint, part: str, module: Any, model: ModelConfig
) -> None:
    """Feed-forward in chunks, and convolutions with channels last: Conv2d NHWC, Conv3d NDHWC."""
    if not checkpoint.row.memory_options:
        return
    is_denoiser = part in checkpoint.row.denoisers
    if model.memory_opt and is_denoiser:
        module.enable_forward_chunking()
    formats = ((torch.nn.Conv2d, torch.channels_last), (torch.nn.Conv3d, torch.channels_last_3d))
    for layer in module.modules() if model.channels_last and (is_denoiser or part == "vae") else ():
        for kind, memory_format in formats:
            if isinstance(layer, kind):
                layer.weight.data = layer.weight.data.contiguous(memory_format=memory_format)


def dtype_of(checkpoint: Checkpoint, part: str, dtype: str) -> torch.dtype:
    """The dtype of a component's weights."""
    return torch.float32 if part in checkpoint.row.fp32 else DTYPES[dtype]


def unused_parts(checkpoint: Checkpoint, part: str, roles: Roles, sampling: Any) -> tuple[str, ...]:
    """The submodules of a component that a rank with these roles does not use."""
    if part != "vae":
        return ()
    encodes = roles.encode and (part in checkpoint.row.encode or sampling.from_image)
    return () if encodes and roles.decode else _ONLY_DECODE if encodes else _ONLY_ENCODE


def skeleton(
    cls: Any, checkpoint: Checkpoint, part: str, dtype: torch.dtype, device: torch.device
) -> Any:
    """Stands for a component that this rank does not load: its config, and weights without data.

    Who computes with it gets an error, not wrong numbers.
    """
    with library_errors(part, checkpoint), torch.device("meta"):
        module = new_module(cls, checkpoint.folder / part).eval()
    torch.nn.Module.to(module, dtype)  # not the class's own, which warns about float32
    module.__class__ = _on_device(cls, str(device))
    module.is_skeleton = True
    return module


@functools.cache
def _on_device(cls: Any, device: str) -> Any:
    """A subclass of a pipeline's or a module's class that says where its work is done."""
    place = property(lambda _: torch.device(device))
    attributes = {"device": place, "_execution_device": place, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), attributes)


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
