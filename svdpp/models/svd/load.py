"""Loading the components that a rank needs from a checked checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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

from svdpp.models.loading import ComponentLoader, library_errors, silence_libraries, torch_dtype
from svdpp.models.svd.checkpoint import SvdCheckpoint

#: The class of each component that has weights.
CLASSES: Mapping[str, Any] = {
    "unet": UNetSpatioTemporalConditionModel,
    "vae": AutoencoderKLTemporalDecoder,
    "image_encoder": CLIPVisionModelWithProjection,
}


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
    weights = torch_dtype(dtype)
    load = ComponentLoader(checkpoint, torch.device(device))
    parts = Parts(device=load.device, dtype=weights, scheduler_config=_scheduler_config(checkpoint))
    if encode:
        parts.feature_extractor = load_feature_extractor(checkpoint)
        parts.image_encoder = load.module(CLASSES["image_encoder"], "image_encoder", weights)
    if encode or decode:
        unused = () if encode and decode else ("decoder",) if encode else ("encoder", "quant_conv")
        parts.vae = load.module(CLASSES["vae"], "vae", weights, unused)
    if denoise:
        parts.unet = load.module(CLASSES["unet"], "unet", weights)
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
    with library_errors("feature_extractor", checkpoint):
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
    with library_errors("scheduler"):
        return EulerDiscreteScheduler.from_config(dict(source))


def _scheduler_config(checkpoint: SvdCheckpoint) -> Mapping[str, Any]:
    with library_errors("scheduler", checkpoint):
        config: Mapping[str, Any] = EulerDiscreteScheduler.load_config(
            checkpoint.folder / "scheduler", local_files_only=True
        )
    return config
