"""Loading a pipeline for one rank: its own components, and skeletons of the others."""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import diffusers
import torch

from svdpp.models.engine.call import replaced
from svdpp.models.engine.checkpoint import RowCheckpoint, has_weights
from svdpp.models.hub import show_name
from svdpp.models.loading import (
    ComponentLoader,
    library_errors,
    meta_module,
    silence_libraries,
    torch_dtype,
)
from svdpp.models.lora import LoraFile
from svdpp.plan.layout import Roles

#: Where the classes of components are; LTX-2 has some beside its pipelines.
_LIBRARIES = ("diffusers", "transformers", "diffusers.pipelines.ltx2")


@dataclass(kw_only=True)
class Parts:
    """What one rank has loaded; shared by all models that `with_sampling` derives."""

    pipe: Any
    """diffusers' pipeline; components of other ranks are skeletons."""
    checkpoint: RowCheckpoint
    device: torch.device
    dtype: str
    from_image: bool
    """Whether clips are made from an image."""
    texts: dict[Any, Any] = field(default_factory=dict)
    """Embeddings of the last prompts, so that each distinct prompt is encoded once."""

    def for_clips(self, *, from_image: bool) -> Parts:
        """The same components, in the pipeline for clips from an image, or from text alone.

        Components for images also make clips from text, but not the other way round.
        """
        if from_image == self.from_image:
            return self
        assert self.from_image, "a rank for clips from text has no encoder of images"
        pipe = new_pipeline(self.checkpoint, from_image, self.pipe.components, self.device)
        return replace(self, pipe=pipe, from_image=from_image)


def load_parts(
    checkpoint: RowCheckpoint, *, sampling: Any, roles: Roles, dtype: str, device: str
) -> Parts:
    """Loads the components for a rank; also turns off the libraries' progress bars and warnings.

    Args:
        checkpoint: found and checked.
        sampling: of the clips; a rank that encodes images needs more components.
        roles: of the rank.
        dtype: `fp32`, `fp16` or `bf16`; some components are always in fp32.
        device: as torch spells it.

    Raises:
        ModelError: the weights do not fit the model's class, or a library rejects them.
        OutOfMemoryError: the device or the host has too little memory.
        RequestError: the device cannot be used.
    """
    silence_libraries()
    load = ComponentLoader(checkpoint, torch.device(device))
    needed = checkpoint.parts_of(roles, sampling)
    parts: dict[str, Any] = {}
    for part, name in checkpoint.classes:
        cls, weights = component_class(part, name), dtype_of(checkpoint, part, dtype)
        if not has_weights(part):
            needs = part in needed
            parts[part] = load_processor(checkpoint, part, cls, load.device) if needs else None
        elif part in needed:
            unused = unused_parts(checkpoint, part, roles, sampling)
            parts[part] = load.module(cls, part, weights, unused)
        else:
            with library_errors(part, checkpoint):
                parts[part] = skeleton(cls, checkpoint, part, weights, load.device)
    pipe = new_pipeline(checkpoint, sampling.from_image, parts, load.device)
    load_loras(pipe, checkpoint)
    return Parts(
        pipe=pipe,
        checkpoint=checkpoint,
        device=load.device,
        dtype=dtype,
        from_image=sampling.from_image,
    )


def load_loras(pipe: Any, checkpoint: RowCheckpoint) -> None:
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


def new_pipeline(
    checkpoint: RowCheckpoint, from_image: bool, parts: dict[str, Any], device: torch.device
) -> Any:
    """The pipeline with these components, on `device` even if its first one is a skeleton."""
    cls = getattr(diffusers, checkpoint.row.pipeline(from_image))
    accepted = inspect.signature(cls.__init__).parameters
    with library_errors("the pipeline", checkpoint):
        settings = cls.load_config(checkpoint.folder, local_files_only=True)
        # Of the others, the config has the library and the class.
        known = {name: value for name, value in settings.items() if not isinstance(value, list)}
        known |= {**parts, "scheduler": new_scheduler(checkpoint, None)}
        pipe = cls(
            **{
                name: known.get(name)
                for name, parameter in accepted.items()
                if name in known or (name != "self" and parameter.default is parameter.empty)
            }
        )
    pipe.set_progress_bar_config(disable=True)
    pipe.__class__ = _on_device(cls, str(device))
    return pipe


def new_scheduler(checkpoint: RowCheckpoint, sampling: Any) -> Any:
    """A scheduler for one clip."""
    scheduler = checkpoint.scheduler if sampling is None else checkpoint.scheduler_of(sampling)
    with library_errors("scheduler", checkpoint):
        return getattr(diffusers, scheduler.name).from_config(dict(scheduler.values))


def set_up(pipe: Any, checkpoint: RowCheckpoint, sampling: Any) -> None:
    """Gives the pipeline the scheduler of a clip, and its guider, if it has one, the scale."""
    pipe.scheduler = new_scheduler(checkpoint, sampling)
    if (guider := getattr(pipe, "guider", None)) is not None:
        scale = {"guidance_scale": sampling.guidance_scale}
        pipe.guider = type(guider).from_config({**guider.config, **scale})


def component_class(part: str, name: str) -> Any:
    """The class of a component, of diffusers or transformers."""
    with library_errors(part):
        found = (importlib.import_module(library) for library in _LIBRARIES)
        return next(getattr(library, name) for library in found if hasattr(library, name))


def dtype_of(checkpoint: RowCheckpoint, part: str, dtype: str) -> torch.dtype:
    """The dtype of a component's weights."""
    return torch.float32 if part in checkpoint.fp32_components else torch_dtype(dtype)


def unused_parts(
    checkpoint: RowCheckpoint, part: str, roles: Roles, sampling: Any
) -> tuple[str, ...]:
    """The submodules of a component that a rank with these roles does not use."""
    if part != "vae":
        return ()
    row = checkpoint.row
    encodes = roles.encode and (part in row.encode or sampling.from_image)
    return () if encodes and roles.decode else row.only_decode if encodes else row.only_encode


def skeleton(
    cls: Any, checkpoint: RowCheckpoint, part: str, dtype: torch.dtype, device: torch.device
) -> Any:
    """Stands for a component that this rank does not load: its config, and weights without data.

    Who computes with it gets an error, not wrong numbers.
    """
    module = meta_module(cls, checkpoint.folder / part).eval()
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


def load_processor(checkpoint: RowCheckpoint, part: str, cls: Any, device: torch.device) -> Any:
    """A component without weights."""
    load = ComponentLoader(checkpoint, device)
    return load.tokenizer(cls) if part == "tokenizer" else load.processor(cls, part)
