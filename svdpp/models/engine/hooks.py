"""Hooks that intercept method calls of diffusers' objects, and of later copies of the objects."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Name of the attribute that a hooked object gets. Its value is the handler of the hooked methods.
HOOK = "_svdpp_hook"


def hook(target: Any, handler: Any, methods: dict[str, str]) -> None:
    """Redirect some methods of an object, and of its later copies, to methods of a handler.

    The function replaces the object's class by a subclass. A second call for the same object only
    changes the handler.

    Args:
        target: Scheduler, or block of a modular pipeline.
        handler: Object whose methods are called instead. They get the hooked object, the object's
            real bound method, and the arguments of the call. A deep copy of the hooked object
            would also copy the handler, so `__deepcopy__` of the handler should return the handler
            itself.
        methods: Names of the handler's methods, by the names of the object's methods, such as
            `{"__call__": "run_block"}`.
    """
    if not hasattr(target, HOOK):
        real: Any = type(target)
        target.__class__ = _hooked_class(real, tuple(methods.items()))
    setattr(target, HOOK, handler)


@contextmanager
def hooked(target: Any, handler: Any, methods: dict[str, str]) -> Iterator[None]:
    """Redirect methods of an object to a handler while the `with` block runs; see `hook`."""
    plain = target.__class__
    hook(target, handler, methods)
    try:
        yield
    finally:
        delattr(target, HOOK)  # so that the handler, and the tensors that it holds, can be freed
        target.__class__ = plain


@functools.cache
def _hooked_class(real: Any, methods: tuple[tuple[str, str], ...]) -> Any:
    # The subclass has the names and signatures of the real class, because pipelines inspect them,
    # and because diffusers writes the name of a scheduler's class into the config.
    own: dict[str, Any] = {"__module__": real.__module__, "__qualname__": real.__qualname__}
    for name, handled_by in methods:
        own[name] = _hooked_method(getattr(real, name), handled_by)
    return type(real.__name__, (real,), own)


def _hooked_method(real: Any, handled_by: str) -> Any:
    @functools.wraps(real)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = getattr(getattr(self, HOOK), handled_by)
        return handle(self, functools.partial(real, self), *args, **kwargs)

    return method
