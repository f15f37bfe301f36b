"""The whole call: diffusers' unmodified pipeline of any family, on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

from svdpp.config import ClipRequest, ModelConfig, SamplingConfig
from svdpp.media.video import Frames
from svdpp.models.base import LATENTS, PREDICTION, STATE, Audio, Source, Tensors
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.engine.call import step_callback
from svdpp.models.engine.configs import library_errors
from svdpp.models.engine.load import (
    apply_memory_options,
    dtype_of,
    load_loras,
    set_up,
    silence_libraries,
)
from svdpp.models.engine.model import audio_of, call_arguments
from svdpp.models.engine.records import replaced
from svdpp.models.engine.rows import Row
from svdpp.models.engine.values import Packer, changed_state, snapshot


class Reference:
    """diffusers' unmodified pipeline, as a user of diffusers loads it, on one device."""

    def __init__(self, checkpoint: Checkpoint, model: ModelConfig, device: str) -> None:
        self._checkpoint, self._model, self._device = checkpoint, model, device
        self._loaded: tuple[bool, Any] | None = None

    def run(
        self,
        request: ClipRequest,
        source: Source | None,
        sampling: SamplingConfig,
        *,
        before_steps: Callable[[], None],
        after_step: Callable[[int, Tensors], None],
    ) -> tuple[torch.Tensor, Frames, Audio | None]:
        """Makes one clip by `__call__`; returns its final latent, its frames and its sound.

        Args:
            request: gives seed and prompts.
            source: fitted to the frame's shape; None for a clip from text alone.
            sampling: resolved.
            before_steps: called before the first step.
            after_step: called after each step, with its index, the latent and the solver's history.
        """
        checkpoint, row = self._checkpoint, self._checkpoint.row
        pipe = self._pipe(source is not None)
        set_up(pipe, checkpoint, sampling)
        device = row.generator_device(checkpoint, sampling, self._device)
        generator = torch.Generator(device).manual_seed(request.seed)
        steps = _Steps(pipe, row, before_steps, after_step)
        callback = step_callback(pipe, steps.end)
        with ExitStack() as patches:
            if not callback:
                step = steps.scheduler_step(pipe.scheduler.step)
                patches.enter_context(replaced(pipe.scheduler, step=step))
            for module in filter(None, (getattr(pipe, part, None) for part in row.denoisers)):
                patches.enter_context(replaced(module, forward=steps.forward(module.forward)))
            output = pipe(
                **call_arguments(pipe, checkpoint, sampling, request, source, generator),
                **callback,
                output_type="pil",
            )
        return steps.latent, stack_frames(output.frames[0]), audio_of(pipe, output.get("audio"))

    def _pipe(self, from_image: bool) -> Any:
        """The pipeline as a user of diffusers loads it; kept for the next clips."""
        if self._loaded is not None and self._loaded[0] == from_image:
            return self._loaded[1]
        self._loaded = None  # frees its memory
        silence_libraries()
        checkpoint, dtype = self._checkpoint, self._model.dtype
        dtypes = {part: dtype_of(checkpoint, part, dtype) for part in checkpoint.row.fp32}
        cls = getattr(diffusers, checkpoint.row.pipeline(from_image))
        with library_errors("the pipeline"):
            pipe = cls.from_pretrained(
                checkpoint.folder,
                dtype={"default": dtype_of(checkpoint, "", dtype), **dtypes},
                variant=checkpoint.variant,
                use_safetensors=True,
                local_files_only=True,
            )
        pipe.set_progress_bar_config(disable=True)
        pipe.to(self._device)
        load_loras(pipe, checkpoint)
        for part in {"vae", *checkpoint.row.denoisers} & pipe.components.keys():
            apply_memory_options(checkpoint, part, getattr(pipe, part), self._model)
        self._loaded = from_image, pipe
        return pipe


class _Steps:
    """The steps of one call, those of all its loops; observing them changes no tensor."""

    latent: torch.Tensor

    def __init__(
        self,
        pipe: Any,
        row: Row,
        before_steps: Callable[[], None],
        after_step: Callable[[int, Tensors], None],
    ) -> None:
        self._pipe, self._before_steps, self._after_step = pipe, before_steps, after_step
        self._keeps = row.branches == "calls"
        self._count = 0
        self._state: dict[str, Any] = {}
        self._outputs: list[Any] = []

    def forward(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A denoiser's; its first call is the end of the encode."""

        @functools.wraps(real)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._state:
                self._state = snapshot(self._pipe.scheduler)
                self._before_steps()
            output = real(*args, **kwargs)
            if self._keeps:
                self._outputs.append(output)
            return output

        return forward

    def scheduler_step(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            self.end(None, 0, None, {LATENTS: result[0]})
            return result

        return step

    def end(self, _: Any, __: int, ___: Any, values: Tensors) -> Tensors:
        packer = Packer()
        packer.pack(changed_state(self._state, self._pipe.scheduler), STATE)
        for branch, output in enumerate(self._outputs):
            packer.pack(output, f"{PREDICTION}{branch}")
        self._outputs.clear()
        self.latent = values[LATENTS]
        self._after_step(self._count, {**packer.tensors, LATENTS: self.latent})
        self._count += 1
        return {}


def stack_frames(images: list[Image.Image]) -> Frames:
    """Stacks diffusers' list of PIL images to one array (F, H, W, 3) uint8."""
    return np.stack([np.asarray(image, dtype=np.uint8) for image in images])
