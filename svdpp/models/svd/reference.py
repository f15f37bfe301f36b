"""SVD's reference: `StableVideoDiffusionPipeline.__call__`, as diffusers ships it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import StableVideoDiffusionPipeline
from PIL import Image

from svdpp.config import ClipRequest, ModelConfig, SvdSampling
from svdpp.models.base import LATENTS, Audio, Frames, Tensors
from svdpp.models.loading import silence_libraries, torch_dtype
from svdpp.models.svd.checkpoint import SvdCheckpoint
from svdpp.models.svd.decode import stack_frames
from svdpp.models.svd.load import convert_to_channels_last


class SvdReference:
    """The whole pipeline on one device; see `models.families.Reference`.

    Args:
        checkpoint: found and checked.
        model: precision and memory options, the same as those of the ranks.
        device: of all components.
    """

    audio: Audio | None = None

    def __init__(self, checkpoint: SvdCheckpoint, model: ModelConfig, device: str) -> None:
        silence_libraries()
        self._pipe = StableVideoDiffusionPipeline.from_pretrained(
            checkpoint.folder,
            dtype=torch_dtype(model.dtype),
            variant=checkpoint.variant,
            use_safetensors=True,
            local_files_only=True,
        ).to(device)
        self._pipe.set_progress_bar_config(disable=True)
        if model.memory_opt:
            self._pipe.unet.enable_forward_chunking()
        if model.channels_last:
            for module in (self._pipe.unet, self._pipe.vae):
                convert_to_channels_last(module)

    def run(
        self,
        request: ClipRequest,
        image: Image.Image | None,
        sampling: SvdSampling,
        *,
        before_steps: Callable[[], None],
        after_step: Callable[[int, Tensors], None],
    ) -> tuple[torch.Tensor, Frames]:
        """See `models.families.Reference`."""
        last: dict[str, torch.Tensor] = {}

        def on_step_end(
            pipe: Any,  # noqa: ARG001
            step: int,
            timestep: Any,  # noqa: ARG001
            tensors: dict[str, torch.Tensor],
        ) -> dict[str, torch.Tensor]:
            last[LATENTS] = tensors[LATENTS]
            after_step(step, last)
            return {}

        # Changes no tensor; its first call is the end of the encode.
        hook = self._pipe.unet.register_forward_pre_hook(lambda *_: before_steps())
        images = self._pipe(
            image,
            height=sampling.height,
            width=sampling.width,
            num_frames=sampling.num_frames,
            num_inference_steps=sampling.num_inference_steps,
            min_guidance_scale=sampling.min_guidance_scale,
            max_guidance_scale=sampling.max_guidance_scale,
            fps=sampling.fps,
            motion_bucket_id=sampling.motion_bucket_id,
            noise_aug_strength=sampling.noise_aug_strength,
            decode_chunk_size=sampling.decode_chunk_size,
            generator=torch.Generator("cpu").manual_seed(request.seed),
            callback_on_step_end=on_step_end,
            output_type="pil",
        ).frames[0]
        hook.remove()
        return last[LATENTS], stack_frames(images)
