"""Loading a pipeline for one rank: its own components, and skeletons of the others."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field, replace
from typing import Any

import diffusers
import torch
from transformers.utils import is_torchvision_available

from svdpp.config import ModelConfig
from svdpp.models.checkpoint import Checkpoint, has_weights
from svdpp.models.engine.configs import library_errors
from svdpp.models.engine.lora import load_loras
from svdpp.models.engine.rows import ROWS
from svdpp.models.loading import (
    load_module,
    load_processor,
    new_module,
    silence_libraries,
    torch_dtype,
)
from svdpp.plan.layout import Roles

#: Where the classes of components are; LTX-2 has some beside its pipelines.
_LIBRARIES = ("diffusers", "transformers", "diffusers.pipelines.ltx2")
#: Submodules of VAEs that are used by an encode of images alone, and by a decode.
_ONLY_ENCODE, _ONLY_DECODE = ("encoder", "quant_conv"), ("decoder", "post_quant_conv")


@dataclass(kw_only=True)
class Parts:
    """What one rank has loaded; shared by all models that `with_sampling` derives."""

    pipe: Any
    """diffusers' pipeline; components of other ranks are skeletons."""
    checkpoint: Checkpoint
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


def preload(family: str) -> None:
    """Imports diffusers' pipelines of a family, and with them its other classes."""
    silence_libraries()
    for name in (ROWS[family].text, ROWS[family].image):
        if name is not None:
            getattr(diffusers, name)


def load_parts(
    checkpoint: Checkpoint, model: ModelConfig, *, sampling: Any, roles: Roles, device: str
) -> Parts:
    """Loads the components for a rank with these roles, and skeletons of the others."""
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
    return Parts(
        pipe=pipe,
        checkpoint=checkpoint,
        device=place,
        dtype=model.dtype,
        from_image=sampling.from_image,
    )


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
    if name in ("CLIPImageProcessor", "CLIPFeatureExtractor"):
        # Without torchvision, transformers takes the second class, with a warning.
        name = "CLIPImageProcessor" if is_torchvision_available() else "CLIPImageProcessorPil"
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
    return torch.float32 if part in checkpoint.row.fp32 else torch_dtype(dtype)


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
