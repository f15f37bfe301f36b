"""SVD as a `VideoModel`: the components that one rank needs, with diffusers' methods."""

from __future__ import annotations

import torch
from diffusers import StableVideoDiffusionPipeline
from PIL import Image

from svdpp.config import ClipRequest, ModelConfig, SamplingConfig, SvdSampling
from svdpp.models.base import LATENTS, AfterStep, Audio, Tensors, run_steps
from svdpp.models.loading import torch_dtype
from svdpp.models.svd import load
from svdpp.models.svd.checkpoint import SvdCheckpoint
from svdpp.models.svd.decode import decode_latent
from svdpp.models.svd.denoise import SvdDenoiser
from svdpp.models.svd.encode import (
    ADDED_TIME_IDS,
    IMAGE_EMBEDDING,
    IMAGE_LATENTS,
    encode_image,
    prepare_image,
)
from svdpp.plan.layout import Roles


class SvdModel:
    """Stable Video Diffusion, or any checkpoint of its classes.

    Args:
        checkpoint: found and checked.
        parts: the loaded components; None for those that this rank does not need.
        sampling: resolved with the checkpoint's defaults.
        dtype: of the weights and the packets.
    """

    def __init__(
        self, checkpoint: SvdCheckpoint, parts: load.Parts, sampling: SvdSampling, dtype: str
    ) -> None:
        self.device = parts.device
        self._checkpoint = checkpoint
        self._parts = parts
        self._sampling = sampling
        self._dtype = dtype
        # Only its methods that encode and decode are called, with the components of this rank.
        self._pipe = StableVideoDiffusionPipeline(
            vae=parts.vae,
            image_encoder=parts.image_encoder,
            unet=None,
            scheduler=load.new_scheduler(checkpoint),
            feature_extractor=parts.feature_extractor,
        )

    def with_sampling(self, sampling: SamplingConfig) -> SvdModel:
        """The same loaded components with other sampling parameters."""
        assert isinstance(sampling, SvdSampling)
        return SvdModel(self._checkpoint, self._parts, sampling, self._dtype)

    def probe_packet(self, *, has_stepped: bool = False) -> Tensors:  # noqa: ARG002
        """Noise, in the shapes of latents, image latents, image embedding and time ids."""
        factor = self._checkpoint.vae_scale_factor
        size = self._sampling.height // factor, self._sampling.width // factor
        channels = self._checkpoint.latent_channels
        shapes = {
            LATENTS: (1, self._sampling.frames, channels, *size),
            IMAGE_LATENTS: (1, channels, *size),
            IMAGE_EMBEDDING: (1, 1, self._checkpoint.cross_attention_dim),
            ADDED_TIME_IDS: (1, 3),
        }
        generator, dtype = torch.Generator().manual_seed(0), torch_dtype(self._dtype)
        return {
            name: torch.randn(shape, generator=generator).to(self.device, dtype)
            for name, shape in shapes.items()
        }

    def prepare(self, image: Image.Image) -> Tensors:
        """See `prepare_image`."""
        return prepare_image(self._pipe, image, self._sampling)

    def encode(self, prepared: Tensors, request: ClipRequest) -> Tensors:
        """See `encode_image`."""
        assert prepared, "SVD animates an image"
        return encode_image(
            self._pipe,
            prepared,
            seed=request.seed,
            sampling=self._sampling,
            latent_channels=self._checkpoint.latent_channels,
            device=self.device,
        )

    def denoiser(self, tensors: Tensors, start: int) -> SvdDenoiser:
        """A denoiser with its own scheduler; all clips share the UNet."""
        scheduler = load.new_scheduler(self._checkpoint)
        return SvdDenoiser(self._parts.unet, scheduler, tensors, self._sampling, start)

    def removed_text(self, prompt: str) -> str:  # noqa: ARG002
        """Nothing, because the model takes no prompt."""
        return ""

    def denoise(self, tensors: Tensors, start: int, end: int, after_step: AfterStep) -> Tensors:
        """See `run_steps`."""
        return run_steps(self.denoiser(tensors, start), tensors, start, end, after_step)

    audio: Audio | None = None

    def decode(self, tensors: Tensors) -> torch.Tensor:
        """See `decode_latent`."""
        return decode_latent(self._pipe, tensors[LATENTS], self._sampling)

    @property
    def frames_shape(self) -> tuple[int, int, int, int]:
        """F, H, W, 3."""
        return self._sampling.frames, self._sampling.height, self._sampling.width, 3


def load_svd(
    checkpoint: SvdCheckpoint,
    model: ModelConfig,
    sampling: SvdSampling,
    device: str,
    roles: Roles,
) -> SvdModel:
    """Loads only the components for a rank with these roles.

    Raises:
        ModelError: the weights do not fit the checkpoint's configuration.
        OutOfMemoryError: the device has too little memory.
    """
    parts = load.load_parts(
        checkpoint,
        encode=roles.encode,
        denoise=roles.denoise,
        decode=roles.decode,
        dtype=model.dtype,
        device=device,
        memory_opt=model.memory_opt,
        channels_last=model.channels_last,
    )
    return SvdModel(checkpoint, parts, sampling, model.dtype)
