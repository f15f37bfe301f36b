"""Owns the part of a `VideoModel` that is the same for all families that run diffusers' `__call__`.

Every stage is a call of the unmodified pipeline: with an empty range of steps it encodes or
decodes, with others it denoises. A family states what travels between the calls.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from PIL import Image

from svdpp.config import ClipRequest, TensorSpec
from svdpp.errors import NotFiniteError
from svdpp.models.base import LATENTS, AfterStep, Tensors
from svdpp.models.family_config import SchedulerConfig
from svdpp.models.step_range import (
    call_range,
    check_pipeline,
    range_scheduler,
    read_state,
    replaced,
)
from svdpp.models.svd.decode import to_bytes

PROMPT_EMBEDS = "prompt_embeds"
NEGATIVE_PROMPT_EMBEDS = "negative_prompt_embeds"

_IMAGE = "image"
_MAX_CACHED_PROMPTS = 16


@dataclass(kw_only=True)
class RangeParts:
    """What one rank has loaded; shared by all models that `with_sampling` derives."""

    pipe: Any
    """diffusers' pipeline with the components of this rank."""
    device: torch.device
    dtype: str
    """Of the text encoder and the transformers."""
    has_image: bool
    """Whether clips are made from an image."""
    prompts: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """Embeddings of the last prompts, so that each distinct prompt is encoded once."""

    def in_pipeline(self, pipeline_class: Any, *, has_image: bool) -> RangeParts:
        """The same components, in the pipeline for clips from an image, or from text alone.

        Components for images also make clips from text, but not the other way round.
        """
        if has_image == self.has_image:
            return self
        assert self.has_image, "a rank for clips from text has no encoder of images"
        known = {**self.pipe.config, **self.pipe.components}
        accepted = inspect.signature(pipeline_class.__init__).parameters
        pipe = pipeline_class(**{name: known[name] for name in accepted if name in known})
        return replace(self, pipe=pipe, has_image=has_image)


class RangeModel(ABC):
    """The model of one rank, whose stages are calls of diffusers' pipeline.

    Args:
        parts: the loaded components.
        sampling: the parameters of the family.
    """

    _generator_device = "cpu"

    def __init__(self, parts: RangeParts, sampling: Any) -> None:
        check_pipeline(parts.pipe)
        parts.pipe.set_progress_bar_config(disable=True)
        self.device = parts.device
        self._parts = parts
        self._pipe = parts.pipe
        self._sampling = sampling

    # 1. What a family states.

    @abstractmethod
    def with_sampling(self, sampling: Any) -> Self:
        """The same loaded components with other sampling parameters."""

    @abstractmethod
    def packet_spec(self, next_step: int) -> Mapping[str, TensorSpec]:
        """Name, shape and dtype of each tensor in a packet after `next_step` steps."""

    @abstractmethod
    def _scheduler(self) -> SchedulerConfig:
        """With the changes that the sampling parameters ask for."""

    @abstractmethod
    def _arguments(self) -> dict[str, Any]:
        """Arguments of `__call__` that only depend on the sampling parameters."""

    @abstractmethod
    def _encode(self, arguments: Mapping[str, Any], scheduler: Any) -> Tensors:
        """Calls the pipeline with an empty range; returns the tensors before the first step."""

    @abstractmethod
    def _inputs(self, tensors: Tensors) -> dict[str, Any]:
        """Arguments of `__call__` that give it the tensors of a packet."""

    def _replacements(self, tensors: Tensors) -> dict[str, Any]:
        """Methods of the pipeline that return tensors of the packet instead of encoding."""
        del tensors
        return {}

    # 2. The stages.

    def prepare(self, image: Image.Image) -> Tensors:
        """The pixels of the image, (H, W, 3) uint8; the pipeline resizes them itself."""
        return {_IMAGE: torch.from_numpy(np.array(image.convert("RGB")))}

    def encode(self, prepared: Tensors, request: ClipRequest) -> Tensors:
        """Encodes the prompts and the image, and draws the noise.

        Args:
            prepared: the result of `prepare`; empty if clips are made from text alone.
            request: gives the prompts and the seed.
        """
        image = Image.fromarray(prepared[_IMAGE].numpy()) if prepared else None
        assert (image is not None) == self._parts.has_image
        arguments = request_arguments(request, image, self._generator_device)
        arguments |= self._arguments()
        with replaced(self._pipe, _get_t5_prompt_embeds=self._cached_embeds()):
            tensors = self._encode(arguments, self._range(0, 0))
        return self._packet(tensors, 0)

    def denoise(self, tensors: Tensors, start: int, end: int, after_step: AfterStep) -> Tensors:
        """Runs steps `start` to `end` (exclusive); returns the packet after them.

        An exception that `after_step` raises ends the call.
        """
        assert start < end
        scheduler = self._range(start, end, tensors)
        with self._from_packet(tensors):
            latent = call_range(
                self._pipe,
                scheduler,
                self._arguments() | self._inputs(tensors),
                after_step=after_step,
            )
        return self._packet({**tensors, LATENTS: latent, **read_state(scheduler)}, end)

    def decode(self, tensors: Tensors) -> torch.Tensor:
        """Frames (F, H, W, 3) uint8 RGB of the packet after the last step, on the device.

        Raises:
            NotFiniteError: the VAE returned NaN or infinite values.
        """
        steps = self._sampling.num_inference_steps
        postprocess = self._pipe.video_processor.postprocess_video

        def check_and_postprocess(video: torch.Tensor, **options: Any) -> Any:
            if not bool(torch.isfinite(video).all()):  # as colours they would become black
                raise NotFiniteError("the VAE returned values that are not finite")
            return postprocess(video, **options)

        with (
            self._from_packet(tensors),
            replaced(self._pipe.video_processor, postprocess_video=check_and_postprocess),
        ):
            video = call_range(
                self._pipe,
                self._range(steps, steps),
                self._arguments() | self._inputs(tensors),
                output_type="pt",
            )
        return to_bytes(video[0].float())  # from (F, 3, H, W), 0 to 1

    @property
    def frames_shape(self) -> tuple[int, int, int, int]:
        """F, H, W, 3."""
        return self._sampling.num_frames, self._sampling.height, self._sampling.width, 3

    def removed_text(self, prompt: str) -> str:
        """The end of `prompt` that does not fit in `max_sequence_length`; on the encoding rank."""
        tokenizer, length = self._pipe.tokenizer, self._sampling.max_sequence_length
        tokens = tokenizer(prompt).input_ids
        # The last token ends the text, and stays.
        return str(tokenizer.decode(tokens[length - 1 : -1])) if len(tokens) > length else ""

    # 3. Helpers.

    def _range(self, start: int, end: int, tensors: Tensors | None = None) -> Any:
        scheduler = self._scheduler()
        return range_scheduler(scheduler.name, scheduler.values, start, end, tensors)

    @contextmanager
    def _from_packet(self, tensors: Tensors) -> Iterator[None]:
        """Makes the pipeline take from the packet what it would encode."""
        with (
            replaced(self._pipe, **self._replacements(tensors)),
            replaced(self._pipe.video_processor, preprocess=lambda image, **_: image),
        ):
            yield

    def _packet(self, tensors: Tensors, next_step: int) -> Tensors:
        """The tensors that travel after `next_step` steps, in packet order."""
        packet = {name: tensors[name].to(self.device) for name in self.packet_spec(next_step)}
        # Another order in memory can change the bits; `_inputs` restores it where it differs.
        packet[LATENTS] = packet[LATENTS].contiguous()
        return packet

    def _cached_embeds(self) -> Any:
        encode, cache = self._pipe._get_t5_prompt_embeds, self._parts.prompts

        def embeds(prompt: Any, **options: Any) -> Any:
            key = (str(prompt), options.get("max_sequence_length"))
            if key not in cache:
                while len(cache) >= _MAX_CACHED_PROMPTS:
                    del cache[next(iter(cache))]
                cache[key] = encode(prompt=prompt, **options)
            return cache[key]

        return embeds


def request_arguments(
    request: ClipRequest, image: Image.Image | None, generator_device: str = "cpu"
) -> dict[str, Any]:
    """Arguments of `__call__` for one clip: prompts, generator and, if there is one, image.

    A generator on the CPU draws the same numbers for every device.
    """
    return {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "generator": torch.Generator(generator_device).manual_seed(request.seed),
        **({} if image is None else {"image": image}),
    }
