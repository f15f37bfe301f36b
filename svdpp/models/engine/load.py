"""Loader of a rank's pipeline: components that the rank runs, and skeletons of all others.

A skeleton is a component without weights.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import sys
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import diffusers
import psutil
import torch
import tqdm
import transformers
from transformers.processing_utils import ProcessorMixin

from svdpp.config import ModelConfig
from svdpp.config.families.registry import FAMILY_SPECS
from svdpp.errors import ModelError, OutOfMemoryError, is_out_of_memory, memory_details
from svdpp.models.base import DTYPES
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.engine.gguf_denoisers import load_denoiser
from svdpp.models.engine.torchao_denoisers import check_layers
from svdpp.models.files import (
    has_weights,
    is_tokenizer,
    library_errors,
    read_safetensors_header,
    short_repr,
)
from svdpp.plan.roles import Roles

#: Names of the Python modules that define the component classes.
_LIBRARIES = (
    *("diffusers", "transformers"),
    *(
        f"diffusers.pipelines.{spec.pipeline_package}"
        for spec in FAMILY_SPECS.values()
        if spec.pipeline_package is not None
    ),
)
#: Submodules of a VAE that only the encode of images uses, and submodules that only the decode
#: uses.
_ONLY_ENCODE, _ONLY_DECODE = ("encoder", "quant_conv"), ("decoder", "post_quant_conv")


def silence_libraries() -> None:
    """Turn off the progress bars and warnings of diffusers and transformers in this process.

    Call this before the first import of a diffusers pipeline, because the import prints warnings.
    """
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    # If a block of a modular pipeline raises an exception, diffusers logs it with a traceback. Hide
    # this log, because svdpp reports the exception itself.
    logging.getLogger("diffusers.modular_pipelines.modular_pipeline").setLevel(logging.CRITICAL)
    # The default lock of tqdm contains a semaphore. If a signal killed a rank, the semaphore would
    # stay in /dev/shm.
    tqdm.tqdm.set_lock(threading.RLock())


def preload(family: str) -> None:
    """Import a family's pipeline classes and their components, so that later loading is faster."""
    silence_libraries()
    spec = FAMILY_SPECS[family]
    for name in filter(None, (spec.text_pipeline, spec.image_pipeline)):
        getattr(diffusers, name)


def silence_blocks(block: Any) -> None:
    """Turn off the progress bars of a modular pipeline's blocks in this process.

    Args:
        block: Tree of blocks.
    """
    if hasattr(block, "set_progress_bar_config"):
        block.set_progress_bar_config(disable=True)
    # Some blocks show a bar of their own, without a way to turn it off.
    module = sys.modules[type(block).__module__]
    if isinstance(getattr(module, "tqdm", None), type):
        vars(module)["tqdm"] = functools.partial(vars(module)["tqdm"], disable=True)
    for each in block.sub_blocks.values():
        silence_blocks(each)


# 1. Loading of a whole pipeline.


# At the first `with torch.device(...)` of a process, torch lists its functions that create tensors,
# and keeps the list. While transformers loads weights, it replaces `torch.linspace`. A list
# made at that time would lack the real `torch.linspace`, which would later create CPU tensors in a
# `with` block for the meta device. So make torch list its functions now.
with torch.device("meta"):
    torch.empty(0)


def load_pipeline(
    checkpoint: Checkpoint, model: ModelConfig, *, sampling: Any, roles: Roles, device: str
) -> Any:
    """Load a rank's pipeline: the components that the rank runs, and skeletons of all others.

    Skeletons have no weights.

    Args:
        checkpoint: Checked checkpoint, with weights.
        model: Configuration of the checkpoint's model, such as its dtype and attention backend.
        sampling: Resolved sampling parameters.
        roles: Roles of the rank.
        device: Device of the rank.

    Raises:
        ModelError: Files are missing, or do not fit together.
        OutOfMemoryError: A component does not fit on the device.
    """
    silence_libraries()
    place, needed = torch.device(device), checkpoint.components_of(roles, sampling)
    parts: dict[str, Any] = {}
    for part, name in checkpoint.classes:
        cls, dtype = component_class(part, name), component_dtype(checkpoint, part, model.dtype)
        if not has_weights(part):
            parts[part] = load_processor(checkpoint, part, cls) if part in needed else None
        elif part in needed:
            module = parts[part] = _load_module(checkpoint, part, cls, dtype, place)
            for unused in module._modules.keys() & unused_submodules(
                checkpoint, part, roles, sampling
            ):
                delattr(module, unused)
            apply_memory_options(checkpoint, part, module, model)
        else:
            parts[part] = _skeleton(checkpoint, part, dtype, place)
    return build_pipeline(checkpoint, sampling.from_image, parts, place)


def build_pipeline(
    checkpoint: Checkpoint, from_image: bool, parts: dict[str, Any], device: torch.device
) -> Any:
    """Create a pipeline of diffusers from loaded components.

    Args:
        checkpoint: Checked checkpoint.
        from_image: Whether to create the family's pipeline for clips from an image, or the one for
            clips from text. Some families have only one.
        parts: Components by name.
        device: Device that `pipe.device` returns, even if some components are skeletons.

    Raises:
        ModelError: diffusers rejects the components.
    """
    cls = getattr(diffusers, checkpoint.spec.pipeline(from_image))
    own = {**parts, "scheduler": checkpoint.build_scheduler(None)}
    with library_errors("the pipeline", checkpoint):
        if checkpoint.spec.modular is None:
            pipe = cls.from_pretrained(checkpoint.folder, local_files_only=True, **own)
        else:
            pipe = cls(pretrained_model_name_or_path=str(checkpoint.folder), local_files_only=True)
            known = own.keys() & {*pipe.component_names}
            pipe.register_components(**{name: own[name] for name in known})
            silence_blocks(pipe._blocks)
    pipe.set_progress_bar_config(disable=True)
    pipe.__class__ = _on_device(cls, str(device))
    return pipe


def component_class(part: str, name: str) -> Any:
    """Return the class of a component from diffusers or transformers.

    Args:
        part: Name of the component, for errors.
        name: Name of the class in `model_index.json`.

    Raises:
        ModelError: The installed libraries have no such class.
    """
    # `CLIPFeatureExtractor` is an old name of `CLIPImageProcessor`, which older checkpoints have.
    # diffusers replaces it in the same way.
    name = "CLIPImageProcessor" if name == "CLIPFeatureExtractor" else name
    with library_errors(part):
        found = (importlib.import_module(library) for library in _LIBRARIES)
        return next(getattr(library, name) for library in found if hasattr(library, name))


def component_dtype(checkpoint: Checkpoint, part: str, dtype: str) -> torch.dtype:
    """Return the dtype of a component's weights, given the dtype of the model.

    Args:
        checkpoint: Checked checkpoint.
        part: Name of the component.
        dtype: Dtype of the model: `fp32`, `fp16` or `bf16`.
    """
    return torch.float32 if part in checkpoint.spec.fp32_components else DTYPES[dtype]


def unused_submodules(
    checkpoint: Checkpoint, part: str, roles: Roles, sampling: Any
) -> tuple[str, ...]:
    """Return the names of a component's submodules that a rank with these roles never calls.

    Args:
        checkpoint: Checked checkpoint.
        part: Name of the component.
        roles: Roles of the rank.
        sampling: Resolved sampling parameters.
    """
    if part != "vae":
        return ()
    encodes = roles.encode and (part in checkpoint.spec.encode_components or sampling.from_image)
    return () if encodes and roles.decode else _ONLY_DECODE if encodes else _ONLY_ENCODE


def apply_memory_options(
    checkpoint: Checkpoint, part: str, module: Any, model: ModelConfig
) -> None:
    """Apply the options `memory_opt` (chunked feed-forward), `channels_last` and `vae_tiling`.

    Args:
        checkpoint: Checked checkpoint.
        part: Name of the component.
        module: Component, which is changed. With `channels_last`, weights of Conv2d become NHWC,
            and weights of Conv3d NDHWC.
        model: Configuration of the model, with the three options. If the family's VAE can only
            decode in tiles, tiling is always enabled.
    """
    if part == "vae" and (model.vae_tiling or checkpoint.spec.needs_vae_tiling):
        module.enable_tiling()
    if not checkpoint.spec.memory_options:
        return
    is_denoiser = part in checkpoint.spec.denoisers
    if model.memory_opt and is_denoiser:
        module.enable_forward_chunking()
    formats = ((torch.nn.Conv2d, torch.channels_last), (torch.nn.Conv3d, torch.channels_last_3d))
    for layer in module.modules() if model.channels_last and (is_denoiser or part == "vae") else ():
        for kind, memory_format in formats:
            if isinstance(layer, kind):
                layer.weight.data = layer.weight.data.contiguous(memory_format=memory_format)


@functools.cache
def _on_device(cls: Any, device: str) -> Any:
    """Return a subclass of a pipeline or module class, whose property `device` is always `device`.

    The original property may return the meta device, on which skeletons have their weights.
    """
    place = property(lambda _: torch.device(device))
    attributes = {"device": place, "_execution_device": place, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), attributes)


# 2. Loading of one component.


class TextProcessor(ProcessorMixin):  # type: ignore[misc]
    """Tokenizer that replaces a processor for text and images, and returns the same tokens.

    The tokenizer of Kandinsky 5 is a processor for text and images, although the pipeline passes
    only text to it. The processor takes its first argument, the prompt, for an image: if the prompt
    is a URL or a path, the processor would download or open it. This class has no code for images,
    and does not need torchvision.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        super().__init__(tokenizer)


def without_videos(cls: Any) -> Any:
    """Return a subclass of a processor's class that does not load the processor's part for videos.

    That part needs torchvision, and clips from text or images do not use it.
    """

    def __init__(
        self: Any, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None
    ) -> None:
        cls.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    members = {"__init__": __init__, "__module__": cls.__module__}
    members["get_attributes"] = classmethod(lambda _: ["image_processor", "tokenizer"])
    return type(cls.__name__, (cls,), members)


def load_processor(checkpoint: Checkpoint, part: str, cls: Any) -> Any:
    """Load a component that has no weights: a tokenizer, a processor, a guider or a scheduler.

    Args:
        checkpoint: Checked checkpoint.
        part: Name of the component and of its folder.
        cls: Class of the component. If it is a processor for text and images, and the component is
            the pipeline's tokenizer, only the processor's own tokenizer is loaded; see
            `TextProcessor`. Any other such processor is loaded without its part for videos.

    Raises:
        ModelError: The component's files are missing or damaged.
    """
    folder = checkpoint.component_folder(part).path
    files = (folder / name for name in ("tokenizer.json", "spiece.model"))
    if part == "tokenizer" and not any(map(Path.is_file, files)):
        # If neither `tokenizer.json` nor `spiece.model` exists, transformers would not raise an
        # error, but return an empty tokenizer.
        missing = checkpoint.component_folder(part).label("tokenizer.json")
        raise ModelError(f"{missing} is missing")
    with library_errors(part, checkpoint):
        if not issubclass(cls, ProcessorMixin):
            return cls.from_pretrained(folder, local_files_only=True)
        local = {"local_files_only": True, "trust_remote_code": False}
        if not is_tokenizer(part):
            has_videos = "video_processor" in cls.get_attributes()
            return (without_videos(cls) if has_videos else cls).from_pretrained(folder, **local)
        return TextProcessor(transformers.AutoTokenizer.from_pretrained(folder, **local))


def text_processors(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint's tokenizers that are loaded as a `TextProcessor`, by component name.

    Raises:
        ModelError: The files of a tokenizer are missing or damaged.
    """
    tokenizers = {part: component_class(part, name) for part, name in checkpoint.classes}
    return {
        part: load_processor(checkpoint, part, cls)
        for part, cls in tokenizers.items()
        if is_tokenizer(part) and issubclass(cls, ProcessorMixin)
    }


def _load_module(
    checkpoint: Checkpoint, part: str, cls: Any, dtype: torch.dtype, device: torch.device
) -> Any:
    """Load a component with weights, in eval mode, and move it to the device.

    On the CPU, weights stay memory-mapped if the file has the same dtype, so ranks share the
    memory. Parameters keep requires_grad=True, as in diffusers' pipelines. With False, torch would
    choose other CPU kernels, whose results differ in some bits.
    """
    try:
        file = checkpoint.denoiser_file(part)
        with library_errors(part, checkpoint):
            if file is None:
                module = _from_pretrained(checkpoint, part, cls, dtype)
            else:
                module = load_denoiser(checkpoint.folder, file, cls, dtype)
        return module.eval().to(device)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"{part} needs more memory than {device} has free",
            "use `dtype` bf16 or fp16 (half the memory for weights), or use fewer ranks on this "
            "device",
            details={
                "component": part,
                "requested_bytes": _weight_bytes(checkpoint, part, dtype),
                "free_bytes": _free_bytes(device),
                "device": str(device),
                **memory_details(error),
            },
        ) from error


def _weight_bytes(checkpoint: Checkpoint, part: str, dtype: torch.dtype) -> int:
    """Return the size of a component's weights in bytes, after their conversion to `dtype`.

    Quantised weights are not converted, so the result is then the size of the weight files.
    """
    if (file := checkpoint.denoiser_file(part)) is not None:
        return file.path.stat().st_size
    if part in checkpoint.int8_denoisers:
        return sum(path.stat().st_size for path in checkpoint.weight_files(part))
    entries = chain(
        *(read_safetensors_header(path)[1].values() for path in checkpoint.weight_files(part))
    )
    return int(sum(math.prod(entry["shape"]) for entry in entries)) * dtype.itemsize


def _free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU in bytes; for the CPU, the machine's available memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _from_pretrained(checkpoint: Checkpoint, part: str, cls: Any, dtype: torch.dtype) -> Any:
    """Load a component by `from_pretrained` of diffusers or transformers, and check its weights.

    Raises:
        ModelError: Weights are missing or unknown, or have a wrong shape. diffusers and
            transformers themselves would only warn.
    """
    # With `ignore_mismatched_sizes`, transformers does not raise an error for weights of a wrong
    # shape, but lists them in `info`, which is checked below. With `low_cpu_mem_usage`, diffusers
    # creates the module on the meta device, so weights that it could not load stay there.
    own = "low_cpu_mem_usage" if _is_diffusers(cls) else "ignore_mismatched_sizes"
    module, info = cls.from_pretrained(
        checkpoint.component_folder(part).path,
        local_files_only=True,
        use_safetensors=True,
        variant=checkpoint.variant_of(part),
        dtype=dtype,
        output_loading_info=True,
        **{own: True},
    )
    # If a shard is missing, diffusers does not list the shard's weights as missing. They are still
    # on the meta device, so add them to the list.
    absent = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    info["missing_keys"] = {*info["missing_keys"], *absent}
    for problem in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, info[f"{problem}_keys"])):
            first = f"the first of {len(names)} is {short_repr(names[0])}"
            raise ModelError(
                f"{part}: weights are {problem}, {first}",
                details={"component": part, problem: names[:20], "count": len(names)},
            )
    if part in checkpoint.int8_denoisers:
        check_layers(module, part)
    return module


# 3. Components without weights: skeletons.


def _skeleton(checkpoint: Checkpoint, part: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a skeleton: a component with its config, and with weights on the meta device.

    A rank has skeletons in place of components that only other ranks run. If a skeleton is called
    by mistake, torch raises an error.
    """
    module = build_without_weights(checkpoint, part)
    torch.nn.Module.to(module, dtype)  # the class's own `to` would warn about float32 layers
    cls: Any = type(module)
    module.__class__ = _on_device(cls, str(device))
    module.is_skeleton = True
    return module


def build_without_weights(checkpoint: Checkpoint, part: str) -> Any:
    """Create a component from its config, in eval mode, with weights on the meta device.

    Args:
        checkpoint: Checkpoint, of which only configs are read.
        part: Name of the component.

    Raises:
        ModelError: diffusers or transformers cannot create the component from the config.
    """
    cls = component_class(part, dict(checkpoint.classes)[part])
    with library_errors(part, checkpoint), torch.device("meta"):
        return build_module(cls, checkpoint.component_folder(part).path).eval()


def build_module(cls: Any, folder: Path) -> Any:
    """Create the module that a config describes, without loading weights.

    Call this function under the meta device or a fake tensor mode, because otherwise torch
    allocates memory for the weights. The function changes no global state, such as torch's default
    dtype.

    Args:
        cls: Class of the module.
        folder: Folder with the config.
    """
    if _is_diffusers(cls):
        return cls.from_config(cls.load_config(folder, local_files_only=True))
    config = cls.config_class.from_pretrained(folder, local_files_only=True)
    # Remove the dtype from the configs: transformers would make it torch's default dtype for all
    # threads.
    for each in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if each is not None:
            each.dtype = None
    module = cls(config)
    config.dtype = torch.get_default_dtype()
    module.tie_weights()
    return module


def fp32_parameters(module: torch.nn.Module, dtype: torch.dtype) -> list[str]:
    """Return the names of the parameters of a module that the libraries always load in float32.

    The rules are those of `load_model_dict_into_meta` in diffusers 0.42 and `_get_dtype_plan` in
    transformers 5.23.

    Args:
        module: Module of diffusers or transformers.
        dtype: Dtype in which the module is loaded.
    """
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    if dtype == torch.float32 or (dtype != torch.float16 and not _is_diffusers(type(module))):
        return []
    return [name for name, _ in module.named_parameters() if kept.intersection(name.split("."))]


def _is_diffusers(cls: Any) -> bool:
    return bool(cls.__module__.split(".")[0] == "diffusers")
