"""The engine's entry in the list of families; see `models.families.Family`."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from PIL import Image

from svdpp.config import ClipRequest, ModelConfig, SamplingConfig
from svdpp.models.base import LATENTS, Audio, Frames, Tensors
from svdpp.models.engine.call import changed_state, packed_state, snapshot
from svdpp.models.engine.checkpoint import RowCheckpoint
from svdpp.models.engine.load import component_class, dtype_of, load_loras, set_up
from svdpp.models.engine.model import audio_of, call_arguments, load_model, request_arguments
from svdpp.models.engine.values import Packer
from svdpp.models.loading import check_components, library_errors, silence_libraries
from svdpp.models.svd.decode import stack_frames

__all__ = ["check_weights", "conditions", "load_model", "load_reference"]


class EngineReference:
    """diffusers' unmodified pipeline; see `models.families.Reference`."""

    def __init__(self, checkpoint: RowCheckpoint, model: ModelConfig, device: str) -> None:
        self._checkpoint, self._model, self._device = checkpoint, model, device
        self._loaded: tuple[bool, Any] | None = None
        self.audio: Audio | None = None

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
        checkpoint, row = self._checkpoint, self._checkpoint.row
        pipe = self._pipe(image is not None)
        set_up(pipe, checkpoint, sampling)
        before: dict[str, Any] = {}
        last: Tensors = {}

        def begin(*_: Any) -> None:
            if not before:
                before.update(snapshot(pipe.scheduler))
            before_steps()

        steps = itertools.count()  # those of all loops, if there are several

        def on_step_end(_: Any, __: int, ___: Any, values: Tensors) -> Tensors:
            packer = Packer()
            packed_state(packer, changed_state(before, pipe.scheduler))
            last[LATENTS] = values[LATENTS]
            after_step(next(steps), {**packer.tensors, **last})
            return {}

        callback: dict[str, Any] = {"callback_on_step_end": on_step_end}
        if "callback_on_step_end" not in inspect.signature(type(pipe).__call__).parameters:
            callback = {}
            _observe_steps(pipe.scheduler, on_step_end)
        device = row.generator_device(checkpoint, sampling, self._device)
        generator = torch.Generator(device).manual_seed(request.seed)
        # They change no tensor; the first call is the end of the encode.
        modules = [getattr(pipe, name, None) for name in row.denoisers]
        hooks = [each.register_forward_pre_hook(begin) for each in modules if each is not None]
        output = pipe(
            **call_arguments(pipe, checkpoint, sampling),
            **request_arguments(request, image, generator),
            **callback,
            output_type="pil",
        )
        for hook in hooks:
            hook.remove()
        self.audio = audio_of(pipe, row, output.get("audio"))
        return last[LATENTS], stack_frames(output.frames[0])

    def _pipe(self, from_image: bool) -> Any:
        """The pipeline as a user of diffusers loads it; kept for the next clips."""
        if self._loaded is None or self._loaded[0] != from_image:
            self._loaded = None
            self._loaded = from_image, self._load(from_image)
        return self._loaded[1]

    def _load(self, from_image: bool) -> Any:
        silence_libraries()
        checkpoint, dtype = self._checkpoint, self._model.dtype
        dtypes = {part: dtype_of(checkpoint, part, dtype) for part in checkpoint.fp32_components}
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
        return pipe


def _observe_steps(scheduler: Any, on_step_end: Callable[..., Any]) -> None:
    """Calls `on_step_end` after each `scheduler.step`, of a pipeline without such a callback."""
    step = scheduler.step

    @functools.wraps(step)
    def observed(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        on_step_end(None, 0, None, {LATENTS: result[0]})
        return result

    scheduler.step = observed


def load_reference(checkpoint: RowCheckpoint, model: ModelConfig, device: str) -> EngineReference:
    """diffusers' pipeline for text, or for an image, by the clip."""
    return EngineReference(checkpoint, model, device)


def check_weights(checkpoint: RowCheckpoint) -> int:
    """See `models.families.Family`."""
    classes = {part: component_class(part, name) for part, name in checkpoint.classes}
    return check_components(checkpoint, classes)


def conditions(checkpoint: RowCheckpoint) -> dict[str, Any]:
    """Nothing: the bits depend on the request, the device and the libraries alone."""
    del checkpoint
    return {}
