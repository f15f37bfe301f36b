"""What a pipeline's call does outside its steps: recorded once, and replayed by all later ranks.

For that, methods of the pipeline and of its components are replaced while a call lasts.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import DiffusionPipeline

from svdpp.models.base import LATENTS, Tensors
from svdpp.models.engine.rows import Row
from svdpp.models.engine.values import Node, Packer, copied, describe, leaves, tensors_in

# The record whose first tensor is the latent before the first step.
_NOISE_RECORD = "prepare_latents"
# Images before they are encoded.
_UNUSED = (
    *("video_processor.preprocess", "video_processor.preprocess_video"),
    "preprocess_conditions",  # of VACE
)

_METHODS = ("forward", "encode", "decode", "get_image_features", "get_text_features")
_PREPROCESS = ("preprocess", "preprocess_video")
_NOT_RECORDED = ("__init__", "__call__", "check_inputs", "progress_bar")


class Records:
    """What methods of the pipeline and of its components return, and states of its generator.

    `unpacked` is the value of a node of the packet; `given` are its records, None: this call makes
    them.
    """

    def __init__(
        self,
        row: Row,
        unpacked: Callable[[Node], Any],
        generator: torch.Generator,
        given: list[Node] | None,
    ) -> None:
        self.paused = False
        """While it is true, as in steps, nothing is recorded or replayed."""
        self._row, self._unpacked, self._generator = row, unpacked, generator
        self._given, self._left = given, list(given or ())
        self._made: list[tuple[str, Any, torch.Tensor | None]] = []

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """`real`, whose calls are recorded or replayed."""

        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.paused:
                return real(*args, **kwargs)
            if self._given is not None:
                return self._replay(name, real, args, kwargs)
            before = self._generator.get_state()
            self.paused = True
            result = real(*args, **kwargs)
            self.paused = False
            after = self._generator.get_state()
            drew = not torch.equal(before, after)
            if drew or tensors_in(result):
                self._made.append((name, copied(result), after if drew else None))
            return result

        return call

    def _replay(self, name: str, real: Any, args: Any, kwargs: Any) -> Any:
        record = next((each for each in self._left if each["name"] == name), None)
        if record is None:
            return real(*args, **kwargs)  # it returned no tensors when it was called to encode
        self._left.remove(record)
        if record["drew"] is not None:
            self.restore(record["drew"])
        return self._unpacked(record["result"])

    def restore(self, states: Node) -> None:
        """Sets the generator to the state that the packet holds."""
        (state,) = self._unpacked(states)
        self._generator.set_state(state)

    def packed(self, packer: Packer) -> list[Node]:
        """The structure of what was recorded; the first latent is packed by its own name."""
        for name, result, _ in self._made:
            if name == _NOISE_RECORD:
                packer.pack(tensors_in(result)[0], LATENTS)
        records, calls = [], Counter[str]()
        for place, (name, result, drew) in enumerate(self._made):
            use = self._row.records.get(name, "unused" if name in _UNUSED else None)
            is_sent = use == calls[name] if isinstance(use, int) else use != "unused"
            calls[name] += 1
            node = packer.pack(result, f"record.{place}") if is_sent else describe(result)
            state = None if drew is None else packer.pack([drew], f"drew.{place}")
            records.append({"name": name, "result": node, "drew": state})
        return records

    def passed_on(self, received: Tensors, tensors: Tensors) -> list[Node]:
        """The records that were received; what is still used of the noise is in the latent."""
        records = copy.deepcopy(self._given or [])
        for record in records:
            record["drew"] = None  # each step's state is in the packet
            for leaf in leaves(record["result"]):
                name = leaf["name"]
                if name == LATENTS:
                    leaf["name"] = self._row.noise
                elif self._row.records.get(record["name"]) == "first step":
                    leaf["name"] = None
                if leaf["name"] not in (None, LATENTS):
                    tensors[leaf["name"]] = received[name]
        return records


@contextmanager
def replaced(target: Any, **methods: Any) -> Iterator[None]:
    """Replaces methods of this one object, a pipeline or a part of it, while the context lasts."""
    before = {name: vars(target)[name] for name in methods if name in vars(target)}
    for name, method in methods.items():
        object.__setattr__(target, name, method)
    try:
        yield
    finally:
        for name in methods:
            object.__delattr__(target, name)
        for name, method in before.items():
            object.__setattr__(target, name, method)


def component_methods(component: Any) -> dict[str, Callable[..., Any]]:
    """The methods by which pipelines call a component."""
    names = _METHODS if isinstance(component, torch.nn.Module) else _PREPROCESS
    return {name: getattr(component, name) for name in names if hasattr(component, name)}


@functools.cache
def own_methods(pipeline_class: Any) -> tuple[str, ...]:
    """The methods that the pipeline's class defines, and not diffusers' base classes."""
    names: dict[str, Any] = {}
    for cls in pipeline_class.__mro__:
        is_own = cls.__module__.startswith("diffusers.pipelines")
        names |= vars(cls) if is_own and cls not in DiffusionPipeline.__mro__ else {}
    return tuple(
        name
        for name, value in names.items()
        if callable(getattr(value, "__func__", value)) and name not in _NOT_RECORDED
    )
