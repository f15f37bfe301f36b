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

_CLIP_PIXELS, _VAE_PIXELS = "clip_pixels", "vae_pixels"


def facts(configs: Configs) -> Facts:
    """What the configs of a checkpoint say of its frames; refuses other sizes of its inputs."""
    unet, channels = configs.of("unet"), configs.of("vae").count("latent_channels", 64)
    unet.require("in_channels", 2 * channels, "twice the VAE's latent_channels")
    reason = "the size of diffusers' CLIP input"
    configs.of("image_encoder").require("image_size", 224, reason)
    return {"model_frames": unet.count("num_frames", 1024)}


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
