"""Owns the reference of the families that run diffusers' `__call__`: the whole pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from PIL import Image

from svdpp.config import ClipRequest, SamplingConfig
from svdpp.models.base import LATENTS, Frames, Tensors
from svdpp.models.range_model import request_arguments
from svdpp.models.step_range import read_state
from svdpp.models.svd.decode import stack_frames


class RangeReference:
    """diffusers' unmodified pipeline; see `models.families.Reference`.

    Args:
        load: returns the pipeline for the family's sampling parameters, with all components.
        arguments: returns the arguments of `__call__` for these parameters.
        generator_device: returns the device that draws a clip's noise.
    """

    def __init__(
        self,
        load: Callable[[Any], Any],
        arguments: Callable[[Any], Mapping[str, Any]],
        generator_device: Callable[[Any], str] = lambda _: "cpu",
    ) -> None:
        self._load = load
        self._arguments = arguments
        self._generator_device = generator_device
        self._loaded: tuple[SamplingConfig, Any] | None = None

    def run(
        self,
        request: ClipRequest,
        image: Image.Image | None,
        sampling: SamplingConfig,
        *,
        before_steps: Callable[[], None],
        after_step: Callable[[int, Tensors], None],
    ) -> tuple[torch.Tensor, Frames]:
        """See `models.families.Reference`."""
        pipe = self._pipe(sampling)
        last: dict[str, torch.Tensor] = {}

        def on_step_end(
            pipe: Any, step: int, __: Any, tensors: dict[str, torch.Tensor]
        ) -> dict[str, torch.Tensor]:
            last[LATENTS] = tensors[LATENTS]
            after_step(step, last | read_state(pipe.scheduler))
            return {}

        # Changes no tensor; the first call is the end of the encode.
        hook = pipe.transformer.register_forward_pre_hook(lambda *_: before_steps())
        frames = pipe(
            **request_arguments(request, image, self._generator_device(sampling)),
            **self._arguments(sampling),
            callback_on_step_end=on_step_end,
            output_type="pil",
        ).frames[0]
        hook.remove()
        return last[LATENTS], stack_frames(frames)

    def _pipe(self, sampling: SamplingConfig) -> Any:
        """The pipeline, loaded once for the clips of the same parameters."""
        if self._loaded is None or self._loaded[0] != sampling:
            self._loaded = sampling, self._load(sampling)
        return self._loaded[1]
