"""What is replaced on diffusers' objects while a call lasts: methods of this one object alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import DiffusionPipeline

_METHODS = ("forward", "encode", "decode", "get_image_features", "get_text_features")
_PREPROCESS = ("preprocess", "preprocess_video")
_NOT_RECORDED = ("__init__", "__call__", "check_inputs", "progress_bar")


def component_methods(component: Any) -> dict[str, Callable[..., Any]]:
    """The methods by which pipelines call a component."""
    names = _METHODS if isinstance(component, torch.nn.Module) else _PREPROCESS
    return {name: getattr(component, name) for name in names if hasattr(component, name)}


def step_callback(pipe: Any, function: Callable[..., Any]) -> dict[str, Any]:
    """The argument of `__call__` that is called after each step; empty if there is none."""
    name = "callback_on_step_end"
    return {name: function} if name in inspect.signature(type(pipe).__call__).parameters else {}


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


@functools.cache
def range_class(real: Any) -> Any:
    """A subclass of the scheduler class `real` whose steps belong to a call."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._range_call.step(self, functools.partial(real.step, self), args, kwargs)

    # Pipelines inspect the signature of `step`; diffusers writes the name into the config.
    methods = {"step": functools.wraps(real.step)(step), "__module__": real.__module__}
    return type(real.__name__, (real,), methods)


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
