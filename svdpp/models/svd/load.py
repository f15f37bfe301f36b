"""Owns loading the components that a rank needs from a checked checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import (
    AutoencoderKLTemporalDecoder,
    EulerDiscreteScheduler,
    UNetSpatioTemporalConditionModel,
)
from transformers import CLIPVisionModelWithProjection
from transformers.utils import is_torchvision_available

from svdpp.errors import ModelError, OutOfMemoryError, RequestError
from svdpp.models.free_memory import free_bytes
from svdpp.models.loading import silence_libraries, torch_dtype
from svdpp.models.safetensors_header import Header, weight_headers
from svdpp.models.svd.checkpoint import SvdCheckpoint
from svdpp.models.svd.weights import DIFFUSERS_CLASSES, check_names, meta_module


@dataclass(kw_only=True)
class Parts:
    """The components that one rank has loaded; None for those that it does not need.

    The modules are in eval mode, in `dtype`, on `device`.
    """

    device: torch.device
    dtype: torch.dtype
    scheduler_config: Mapping[str, Any]
    """For `new_scheduler`, which is called once per clip."""
    image_encoder: CLIPVisionModelWithProjection | None = None
    feature_extractor: Any = None
    """transformers' CLIP image processor, based on torchvision if installed, otherwise on PIL."""
    vae: AutoencoderKLTemporalDecoder | None = None
    """Without decoder on a rank that only encodes; without encoder on one that only decodes."""
    unet: UNetSpatioTemporalConditionModel | None = None


def load_parts(
    checkpoint: SvdCheckpoint,
    *,
    encode: bool,
    denoise: bool,
    decode: bool,
    dtype: str,
    device: str,
    memory_opt: bool = False,
    channels_last: bool = False,
) -> Parts:
    """Loads the components for a rank that encodes, denoises or decodes.

    On the CPU, weights whose file has the same `dtype` stay mapped to the file, so that ranks share
    their memory. Also turns off the libraries' progress bars and warnings in this process.

    Args:
        checkpoint: from `find_checkpoint`.
        encode: loads the image encoder, the feature extractor and the VAE's encoder.
        denoise: loads the UNet.
        decode: loads the VAE's decoder.
        dtype: `fp32`, `fp16` or `bf16`.
        device: as torch spells it.
        memory_opt: turns on feed-forward chunking in the UNet; changes the bits.
        channels_last: stores the weights of UNet and VAE with channels last; changes the bits.

    Raises:
        ModelError: the weights do not fit the model's class, or a library rejects them.
        OutOfMemoryError: the device or the host has too little memory.
        RequestError: the device cannot be used.
    """
    silence_libraries()
    load = _Loader(checkpoint, torch_dtype(dtype), torch.device(device))
    parts = Parts(
        device=load.device, dtype=load.dtype, scheduler_config=_scheduler_config(checkpoint)
    )
    if encode:
        parts.feature_extractor = load_feature_extractor(checkpoint)
        parts.image_encoder = load.module("image_encoder")
    if encode or decode:
        unused = () if encode and decode else ("decoder",) if encode else ("encoder", "quant_conv")
        parts.vae = load.module("vae", unused)
    if denoise:
        parts.unet = load.module("unet")
        if memory_opt:
            parts.unet.enable_forward_chunking()
    if channels_last:
        for module in (parts.unet, parts.vae):
            if module is not None:
                convert_to_channels_last(module)
    return parts


def convert_to_channels_last(module: torch.nn.Module) -> None:
    """Stores the weights of convolutions with channels last: Conv2d as NHWC, Conv3d as NDHWC."""
    formats = ((torch.nn.Conv2d, torch.channels_last), (torch.nn.Conv3d, torch.channels_last_3d))
    for layer in module.modules():
        for kind, memory_format in formats:
            if isinstance(layer, kind):
                layer.weight.data = layer.weight.data.contiguous(memory_format=memory_format)


def feature_extractor_name(checkpoint: SvdCheckpoint) -> str:
    """The class of CLIP image processor that diffusers' own pipeline uses on this machine.

    transformers 5 has two, based on torchvision (`CLIPImageProcessor`) and on PIL. Without
    torchvision the first name gives the second class with a warning; this returns the second name.
    """
    if checkpoint.feature_extractor_class == "CLIPImageProcessorPil":
        return checkpoint.feature_extractor_class
    return "CLIPImageProcessor" if is_torchvision_available() else "CLIPImageProcessorPil"


def load_feature_extractor(checkpoint: SvdCheckpoint) -> Any:
    """The CLIP image processor; see `feature_extractor_name`."""
    cls = getattr(transformers, feature_extractor_name(checkpoint))
    with _library_errors("feature_extractor", checkpoint):
        return cls.from_pretrained(checkpoint.folder / "feature_extractor", local_files_only=True)


def new_scheduler(source: SvdCheckpoint | Mapping[str, Any]) -> EulerDiscreteScheduler:
    """Creates a scheduler for one clip; diffusers' schedulers store their step index.

    Args:
        source: a checkpoint, or its `Parts.scheduler_config`.

    Raises:
        ModelError: the scheduler's class rejects the config.
    """
    if isinstance(source, SvdCheckpoint):
        source = _scheduler_config(source)
    with _library_errors("scheduler"):
        return EulerDiscreteScheduler.from_config(dict(source))


def check_weights(checkpoint: SvdCheckpoint) -> int:
    """Compares the name and shape of every weight with the model's classes; reads no weight.

    Returns:
        The number of tensors.

    Raises:
        ModelError: a weight is missing or unknown, or has a wrong shape or dtype.
    """
    count = 0
    for component in checkpoint.weighted:
        folder = checkpoint.folder / component
        with _library_errors(component, checkpoint):
            headers = weight_headers(checkpoint.folder, component, checkpoint.variant)
            check_names(component, meta_module(component, folder), headers)
        count += sum(map(len, headers.values()))
    return count


@dataclass(frozen=True)
class _Loader:
    checkpoint: SvdCheckpoint
    dtype: torch.dtype
    device: torch.device

    def module(self, component: str, unused: tuple[str, ...] = ()) -> Any:
        """Loads one component to the device, without its `unused` submodules."""
        folder = self.checkpoint.folder / component
        with _library_errors(component, self.checkpoint):
            headers = weight_headers(self.checkpoint.folder, component, self.checkpoint.variant)
        with _library_errors(component, self.checkpoint), self._memory_errors(component, headers):
            check_names(component, meta_module(component, folder), headers)
            module = self._from_pretrained(component, folder)
            for name in unused:
                delattr(module, name)
            # Parameters keep requires_grad, as in diffusers' pipeline. Without it torch uses other
            # CPU kernels, which give other bits.
            module.eval()
        with self._device_errors(), self._memory_errors(component, headers):
            return module.to(self.device)

    def _from_pretrained(self, component: str, folder: Path) -> Any:
        options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
        options["variant"] = self.checkpoint.variant
        if component == "image_encoder":
            return CLIPVisionModelWithProjection.from_pretrained(
                folder, dtype=self.dtype, **options
            )
        options |= {"torch_dtype": self.dtype, "low_cpu_mem_usage": True}
        return DIFFUSERS_CLASSES[component].from_pretrained(folder, **options)

    @contextmanager
    def _memory_errors(self, component: str, headers: Mapping[Path, Header]) -> Iterator[None]:
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            shapes = (shape for header in headers.values() for _, shape in header.values())
            gigabytes = sum(map(math.prod, shapes)) * self.dtype.itemsize / 1e9
            raise OutOfMemoryError(
                f"{component} needs {gigabytes:.2f} GB on {self.device}{_free(self.device)}",
                "use --dtype fp16, which halves the weights, or fewer ranks on this device",
            ) from error

    @contextmanager
    def _device_errors(self) -> Iterator[None]:
        # torch raises AssertionError if it has no CUDA support, RuntimeError if there is no device.
        try:
            yield
        except (AssertionError, RuntimeError) as error:
            raise RequestError(f"{self.device} cannot be used: {_first_line(error)}") from error


def _scheduler_config(checkpoint: SvdCheckpoint) -> Mapping[str, Any]:
    with _library_errors("scheduler", checkpoint):
        config: Mapping[str, Any] = EulerDiscreteScheduler.load_config(
            checkpoint.folder / "scheduler", local_files_only=True
        )
    return config


@contextmanager
def _library_errors(component: str, checkpoint: SvdCheckpoint | None = None) -> Iterator[None]:
    """Converts errors of the libraries to ModelError: their input comes from the checkpoint."""
    label = f"{checkpoint.label}: " if checkpoint else ""
    try:
        yield
    except ModelError as error:
        raise ModelError(label + error.message, error.hint) from error
    except MemoryError:
        raise
    except Exception as error:
        raise ModelError(f"{label}{component} cannot be loaded: {_first_line(error)}") from error


def _is_out_of_memory(error: BaseException) -> bool:
    # The CPU allocator raises a plain RuntimeError: "... can't allocate memory: you tried ...".
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return any(text in str(error) for text in ("can't allocate memory", "not enough memory"))


def _free(device: torch.device) -> str:
    if device.type != "cuda":
        return ", more than is free"
    return f", where {free_bytes(device) / 1e9:.2f} GB are free"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return "".join(char if char.isprintable() else "?" for char in lines[0][:300])
