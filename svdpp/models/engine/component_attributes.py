"""Attributes of schedulers, guiders and denoisers that the steps of a modular pipeline change."""

from __future__ import annotations

import copy
from typing import Any

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from svdpp.errors import ModelError
from svdpp.models.engine.modular_state import NOT_STATE
from svdpp.models.engine.records import snapshot_attributes, tensors_in

#: Attributes of a component or of its modules: name of the module (empty: the component itself),
#: then name of the attribute.
Attributes = dict[str, dict[str, Any]]

_HOOKS = frozenset(name for name in vars(torch.nn.Module()) if "hooks" in name)
_NOT_STATE = NOT_STATE | _HOOKS


def modules_of(component: Any) -> dict[str, Any]:
    """Return the modules of a denoiser by name; for another component, itself with the name ""."""
    is_module = isinstance(component, torch.nn.Module)
    return dict(component.named_modules()) if is_module else {"": component}


def attributes_of(component: Any) -> Attributes:
    """Return the attributes of a component that steps may change, besides its weights.

    Raises:
        ModelError: The component has a hook of diffusers, which may have a state.
    """
    modules = modules_of(component)
    for module in modules.values():
        if getattr(getattr(module, "_diffusers_hook", None), "hooks", None):
            hook = next(iter(module._diffusers_hook.hooks))
            raise ModelError(
                f"{type(component).__name__} has the hook {hook}, whose state no packet carries",
                details={"component": type(component).__name__, "hook": hook},
            )
    return {name: snapshot_attributes(module, _NOT_STATE) for name, module in modules.items()}


def snapshot_component(component: Any) -> Attributes:
    """Return the attributes of a component, to which `set_back_component` sets it back.

    Those of a guider are copied, except tensors, because a guider changes objects that it keeps.
    """
    attributes = attributes_of(component)
    if isinstance(component, (torch.nn.Module, SchedulerMixin)):
        return attributes
    kept = {id(each): each for each in tensors_in(attributes)}
    return copy.deepcopy(attributes, kept)


def set_back_component(component: Any, before: Attributes) -> None:
    """Give a component the attributes that it had, and remove those that steps have added."""
    modules = modules_of(component)
    for name, attributes in attributes_of(component).items():
        for added in attributes.keys() - before[name].keys():
            object.__delattr__(modules[name], added)
        vars(modules[name]).update(before[name])
