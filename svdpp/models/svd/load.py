"""Owns loading: a checked checkpoint becomes the modules that one rank needs; knows no ranks."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers.utils.logging
import torch
import tqdm
import transformers
import transformers.utils.logging
from diffusers import (
    AutoencoderKLTemporalDecoder,
    EulerDiscreteScheduler,
    UNetSpatioTemporalConditionModel,
)
from transformers import CLIPVisionModelWithProjection
from transformers.utils import is_torchvision_available

from svdpp.errors import ModelError, OutOfMemoryError, RequestError
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.free_memory import free_bytes
from svdpp.models.safetensors_header import WEIGHT_STEMS, Header, weight_headers
from svdpp.models.svd.weights import DIFFUSERS_CLASSES, check_names, expected_module


@dataclass(kw_only=True)
class Parts:
    """What one rank holds of a checkpoint; None for what it does not need.

    The modules are in eval mode, all in `dtype` on `device`.
    """

    device: torch.device
    dtype: torch.dtype
    scheduler_config: Mapping[str, Any]
    """For `new_scheduler`, once for each clip in flight."""
    image_encoder: CLIPVisionModelWithProjection | None = None
    feature_extractor: Any = None
    """transformers' CLIP image processor, on torchvision where that is installed, else on PIL."""
    vae: AutoencoderKLTemporalDecoder | None = None
    """Without its decoder on a rank that only encodes, without its encoder on one that decodes."""
    unet: UNetSpatioTemporalConditionModel | None = None


def load_parts(
    checkpoint: Checkpoint,
    *,
    encode: bool,
    denoise: bool,
    decode: bool,
    dtype: str,
    device: str,
    memory_opt: bool = False,
    channels_last: bool = False,
) -> Parts:
    """Loads what a rank with these duties needs.

    On the CPU, weights whose file already has `dtype` stay mapped from it, so that ranks share
    them. Turns off the libraries' progress bars and chatter in this process.

    Args:
        checkpoint: from `find_checkpoint`.
        encode: image encoder, feature extractor and the VAE's encoder.
        denoise: the UNet.
        decode: the VAE's decoder.
        dtype: `fp32`, `fp16` or `bf16`.
        device: as torch spells it.
        memory_opt: feed-forward chunking in the UNet (other bits than without).
        channels_last: memory format of the UNet's and the VAE's weights (other bits, too).

    Raises:
        ModelError: weights that do not fit the model's class, or that a library refuses.
        OutOfMemoryError: the device or the host is too small.
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
                lay_channels_last(module)
    return parts


def lay_channels_last(module: torch.nn.Module) -> None:
    """Stores the convolutions' weights with channels last: Conv2d as NHWC, Conv3d as NDHWC."""
    formats = ((torch.nn.Conv2d, torch.channels_last), (torch.nn.Conv3d, torch.channels_last_3d))
    for layer in module.modules():
        for kind, memory_format in formats:
            if isinstance(layer, kind):
                layer.weight.data = layer.weight.data.contiguous(memory_format=memory_format)


def feature_extractor_name(checkpoint: Checkpoint) -> str:
    """The class of CLIP image processor that diffusers' own pipeline would use here.

    transformers 5 has it twice, on torchvision (`CLIPImageProcessor`) and on PIL. Without
    torchvision the first name gives the second class with a warning, so it is asked for by name.
    """
    if checkpoint.feature_extractor_class == "CLIPImageProcessorPil":
        return checkpoint.feature_extractor_class
    return "CLIPImageProcessor" if is_torchvision_available() else "CLIPImageProcessorPil"


def load_feature_extractor(checkpoint: Checkpoint) -> Any:
    """The CLIP image processor; see `feature_extractor_name`."""
    cls = getattr(transformers, feature_extractor_name(checkpoint))
    with _library_errors("feature_extractor", checkpoint):
        return cls.from_pretrained(checkpoint.folder / "feature_extractor", local_files_only=True)


def new_scheduler(source: Checkpoint | Mapping[str, Any]) -> EulerDiscreteScheduler:
    """A fresh scheduler, for one clip: diffusers' schedulers keep their place in the instance.

    Args:
        source: a checkpoint, or `Parts.scheduler_config` of one.

    Raises:
        ModelError: the config is one that the class refuses.
    """
    if isinstance(source, Checkpoint):
        source = _scheduler_config(source)
    with _library_errors("scheduler"):
        return EulerDiscreteScheduler.from_config(dict(source))


def check_weights(checkpoint: Checkpoint) -> int:
    """Holds every weight's name and shape against the classes' own, without reading one.

    Returns:
        The number of tensors.

    Raises:
        ModelError: one is missing, unknown or of a wrong shape.
    """
    count = 0
    for component in WEIGHT_STEMS:
        home = checkpoint.folder / component
        with _library_errors(component, checkpoint):
            headers = weight_headers(checkpoint.folder, component, checkpoint.variant)
            check_names(component, expected_module(component, home), headers)
        count += sum(map(len, headers.values()))
    return count


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for `fp32`, `fp16` or `bf16`.

    Raises:
        RequestError: any other name.
    """
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if name not in dtypes:
        raise RequestError(f"dtype {name!r} is none of {', '.join(dtypes)}")
    return dtypes[name]


def silence_libraries() -> None:
    """Turns off diffusers' and transformers' progress bars and warnings in this process.

    Call it before the first import of a diffusers pipeline, which warns as it is imported.
    """
    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    # tqdm's own lock holds a semaphore that a rank ended by a signal would leave behind.
    tqdm.tqdm.set_lock(threading.RLock())


@dataclass(frozen=True)
class _Loader:
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device

    def module(self, component: str, unused: tuple[str, ...] = ()) -> Any:
        """One component on the device, without its `unused` submodules."""
        home = self.checkpoint.folder / component
        with _library_errors(component, self.checkpoint):
            headers = weight_headers(self.checkpoint.folder, component, self.checkpoint.variant)
        with _library_errors(component, self.checkpoint), self._memory_errors(component, headers):
            check_names(component, expected_module(component, home), headers)
            module = self._from_pretrained(component, home)
            for name in unused:
                delattr(module, name)
            # Parameters keep requires_grad, needless as it is here: with another setting torch
            # takes other CPU kernels, and the bits are no longer those of diffusers' pipeline.
            module.eval()
        with self._device_errors(), self._memory_errors(component, headers):
            return module.to(self.device)

    def _from_pretrained(self, component: str, home: Path) -> Any:
        options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
        options["variant"] = self.checkpoint.variant
        if component == "image_encoder":
            return CLIPVisionModelWithProjection.from_pretrained(home, dtype=self.dtype, **options)
        options |= {"torch_dtype": self.dtype, "low_cpu_mem_usage": True}
        return DIFFUSERS_CLASSES[component].from_pretrained(home, **options)

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
                "--dtype fp16 halves it; or give this device fewer ranks",
            ) from error

    @contextmanager
    def _device_errors(self) -> Iterator[None]:
        # torch reports a build without CUDA by AssertionError, an absent device by RuntimeError.
        try:
            yield
        except (AssertionError, RuntimeError) as error:
            raise RequestError(f"{self.device} cannot be used: {_first_line(error)}") from error


def _scheduler_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    with _library_errors("scheduler", checkpoint):
        config: Mapping[str, Any] = EulerDiscreteScheduler.load_config(
            checkpoint.folder / "scheduler", local_files_only=True
        )
    return config


@contextmanager
def _library_errors(component: str, checkpoint: Checkpoint | None = None) -> Iterator[None]:
    """Whatever a library raises over a checkpoint is the checkpoint's fault by now."""
    label = f"{checkpoint.label}: " if checkpoint else ""
    try:
        yield
    except ModelError as error:
        raise ModelError(label + error.message, error.hint) from error
    except MemoryError:
        raise
    except Exception as error:
        fault = f"{component} cannot be loaded: {_first_line(error)}"
        raise ModelError(label + fault) from error


def _is_out_of_memory(error: BaseException) -> bool:
    # The CPU allocator raises a plain RuntimeError: "... can't allocate memory: you tried ...".
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return any(words in str(error) for words in ("can't allocate memory", "not enough memory"))


def _free(device: torch.device) -> str:
    if device.type != "cuda":
        return ", more than is free"
    return f", where {free_bytes(device) / 1e9:.2f} GB are free"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return "".join(char if char.isprintable() else "?" for char in lines[0][:300])
