"""Stage 9 of diffusers' SVD `__call__`: the denoising steps, from any start step.

The only state of diffusers' Euler scheduler is its step index. So several schedulers can share the
steps of a clip, each from its own start step.
"""

from __future__ import annotations

import torch
from diffusers import EulerDiscreteScheduler, UNetSpatioTemporalConditionModel
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteSchedulerOutput

from svdpp.config import SvdSampling
from svdpp.models.base import Tensors
from svdpp.models.svd.encode import ADDED_TIME_IDS, IMAGE_EMBEDDING, IMAGE_LATENTS


class SvdDenoiser:
    """Runs a clip's steps from `start` on, bitwise equal to diffusers' own loop.

    Args:
        unet: the full UNet, shared by all clips of a rank.
        scheduler: an instance for this clip only, because it counts the steps.
        tensors: the result of `encode_image`; its latent is not used.
        sampling: resolved.
        start: the first step to run.
    """

    def __init__(
        self,
        unet: UNetSpatioTemporalConditionModel,
        scheduler: EulerDiscreteScheduler,
        tensors: Tensors,
        sampling: SvdSampling,
        start: int,
    ) -> None:
        self._unet = unet
        self._scheduler = scheduler
        self._guided = sampling.guided
        device = tensors[IMAGE_LATENTS].device
        # set_timesteps comes first: it resets the step index, set_begin_index does not.
        scheduler.set_timesteps(sampling.num_inference_steps, device=device)
        scheduler.set_begin_index(start)
        self._next_step = start
        image_latents = self._with_zeros(tensors[IMAGE_LATENTS])
        # [batch, channels, h, w] -> [batch, frames, channels, h, w]
        self._image_latents = image_latents.unsqueeze(1).repeat(1, sampling.frames, 1, 1, 1)
        self._embedding = self._with_zeros(tensors[IMAGE_EMBEDDING])
        added_time_ids = tensors[ADDED_TIME_IDS]
        self._added_time_ids = torch.cat([added_time_ids] * 2) if self._guided else added_time_ids
        self._guidance_scale = guidance_scale(sampling, device, self._embedding.dtype)

    @torch.no_grad()
    def forward(self, latent: torch.Tensor, step: int) -> torch.Tensor:
        """The latent (1, F, C, h, w) after `step`."""
        result: torch.Tensor = self._step(latent, step).prev_sample
        return result

    def _step(self, latent: torch.Tensor, step: int) -> EulerDiscreteSchedulerOutput:
        assert step == self._next_step, f"expected step {self._next_step}, got {step}"
        self._next_step += 1
        noise_pred = self.predict_noise(latent, step)
        return self._scheduler.step(noise_pred, self._scheduler.timesteps[step], latent)

    @torch.no_grad()
    def predict_noise(self, latent: torch.Tensor, step: int) -> torch.Tensor:
        """The UNet's guided output for `latent` (1, F, C, h, w): almost all work of a step."""
        timestep = self._scheduler.timesteps[step]
        model_input = torch.cat([latent] * 2) if self._guided else latent
        model_input = self._scheduler.scale_model_input(model_input, timestep)
        model_input = torch.cat([model_input, self._image_latents], dim=2)
        noise_pred: torch.Tensor = self._unet(
            model_input,
            timestep,
            encoder_hidden_states=self._embedding,
            added_time_ids=self._added_time_ids,
            return_dict=False,
        )[0]
        if self._guided:
            unconditional, conditional = noise_pred.chunk(2)
            noise_pred = unconditional + self._guidance_scale * (conditional - unconditional)
        return noise_pred

    def _with_zeros(self, tensor: torch.Tensor) -> torch.Tensor:
        """With guidance, puts the unconditional half first: zeros, as in diffusers."""
        return torch.cat([torch.zeros_like(tensor), tensor]) if self._guided else tensor


def guidance_scale(sampling: SvdSampling, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Guidance scale per frame, from the minimum to the maximum: shape (1, F, 1, 1, 1)."""
    scale = torch.linspace(
        sampling.min_guidance_scale, sampling.max_guidance_scale, sampling.frames
    )
    return scale.unsqueeze(0).to(device, dtype).reshape(1, sampling.frames, 1, 1, 1)
