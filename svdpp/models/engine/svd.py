"""What is special about Stable Video Diffusion: its sizes, and the early resize."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from svdpp.config import SvdSampling
from svdpp.models.engine.configs import Configs, Facts

if TYPE_CHECKING:
    from PIL import Image

    from svdpp.models.base import Tensors
    from svdpp.models.engine.values import Node

_CLIP_PIXELS, _VAE_PIXELS = "clip_pixels", "vae_pixels"


def facts(configs: Configs) -> Facts:
    """What the configs of a checkpoint say of its frames; refuses another size of images."""
    reason = "the size of diffusers' CLIP input"
    configs.of("image_encoder").require("image_size", 224, reason)
    return {"model_frames": configs.of("unet").count("num_frames", 1024)}


def prepare(pipe: Any, image: Image.Image, sampling: SvdSampling) -> Tensors:
    """The pixels of an image of any size for CLIP, in [0, 1], and for the VAE, in [-1, 1].

    It may run in a thread while the pipeline makes another clip.
    """
    from svdpp.models.engine.resize import resize_for_clip  # imports torch

    processor = pipe.video_processor
    # A call of the pipeline replaces the processor's own method.
    preprocess = type(processor).preprocess
    return {
        # As in `_encode_image`: from [-1, 1], in which it is resized, to [0, 1].
        _CLIP_PIXELS: (resize_for_clip(image) + 1.0) / 2.0,
        _VAE_PIXELS: preprocess(processor, image, height=sampling.height, width=sampling.width),
    }


@contextmanager
def prepared(pipe: Any, pixels: Tensors) -> Iterator[None]:
    """While it lasts, the pipeline encodes `pixels`, of `prepare`, in place of its image."""
    from svdpp.models.engine.patches import replaced  # imports torch

    encode = pipe._encode_image

    def encode_image(_: Image.Image, *args: Any) -> Any:
        return encode(pixels[_CLIP_PIXELS], *args)

    with (
        replaced(pipe, _encode_image=encode_image),
        replaced(pipe.video_processor, preprocess=lambda *_, **__: pixels[_VAE_PIXELS]),
    ):
        yield


def old_packet(tensors: Tensors, sampling: SvdSampling, steps: int) -> tuple[Node, Tensors]:
    """A packet of svdpp 0.3 or earlier: the results without their unconditional halves."""
    import torch
    from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteSchedulerOutput

    from svdpp.models.base import GENERATOR, LATENTS
    from svdpp.models.engine.values import Packer, describe

    def both(tensor: torch.Tensor, *, same: bool = False) -> torch.Tensor:
        other = tensor if same else torch.zeros_like(tensor)
        return torch.cat([other, tensor]) if sampling.guided else tensor

    packer, latents = Packer(), tensors[LATENTS]
    packed = packer.pack(latents, LATENTS)
    pixels = torch.empty(1, 3, sampling.height, sampling.width, device="meta")
    embedding, ids = both(tensors["image_embedding"]), both(tensors["added_time_ids"], same=True)
    results = {
        "_encode_image": packer.pack(embedding, "record.0"),
        "video_processor.preprocess": describe(pixels),
        "_encode_vae_image": packer.pack(both(tensors["image_latents"]), "record.2"),
        "_get_add_time_ids": packer.pack(ids, "record.3"),
        "prepare_latents": describe(latents) if steps else packed,
    }
    result = EulerDiscreteSchedulerOutput(prev_sample=latents, pred_original_sample=None)
    step = {
        "latents": packed,
        "chunks": [[[describe(result)]]],
        "states": [{"kind": "dict", "items": {"_step_index": {"kind": "plain", "value": steps}}}],
        "outputs": [describe((both(latents),))],
        "generators": packer.pack([torch.Generator().get_state()], GENERATOR),
    }
    records = [{"name": name, "result": each, "drew": None} for name, each in results.items()]
    structure = {"records": records, "step": step if steps else None}
    return {**structure, "given": {"negative_prompt": False}}, packer.tensors
