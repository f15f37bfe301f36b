"""Functions that save, restore and pack the attributes that steps of a modular pipeline change.

The attributes are those of schedulers, guiders and denoisers.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from svdpp.errors import ModelError
from svdpp.models.engine.modular_state import NOT_STATE, StatePacker
from svdpp.models.engine.records import is_unchanged, snapshot_attributes, tensors_in

#: Attributes of a component: a dict with an entry for each module of the component, by module name
#: ("" is the component itself). The entry has the values of the module's attributes by name.
Attributes = dict[str, dict[str, Any]]

_HOOKS = frozenset(name for name in vars(torch.nn.Module()) if "hooks" in name)
_NOT_STATE = NOT_STATE | _HOOKS


def modules_of(component: Any) -> dict[str, Any]:
    """Return a denoiser's modules by name; for other components, the component itself under ""."""
    is_module = isinstance(component, torch.nn.Module)
    return dict(component.named_modules()) if is_module else {"": component}


def attributes_of(component: Any) -> Attributes:
    """Return the attributes of a component that steps may change, besides its weights.

    Raises:
        ModelError: The component has a hook of diffusers, whose state would not be included.
    """
    modules = modules_of(component)
    for module in modules.values():
        if getattr(getattr(module, "_diffusers_hook", None), "hooks", None):
            hook = next(iter(module._diffusers_hook.hooks))
            raise ModelError(
                f"{type(component).__name__} has the hook {hook}, whose state svdpp cannot send to "
                "another rank",
                details={"component": type(component).__name__, "hook": hook},
            )
    return {name: snapshot_attributes(module, _NOT_STATE) for name, module in modules.items()}


def snapshot_component(component: Any) -> Attributes:
    """Return a component's current attributes, with which `set_back_component` can restore it.

    A guider changes some values in place, so its values are copied. Its tensors are not copied,
    because a copy of a tensor would later count as a changed attribute.
    """
    attributes = attributes_of(component)
    if isinstance(component, (torch.nn.Module, SchedulerMixin)):
        return attributes
    kept = {id(each): each for each in tensors_in(attributes)}
    return copy.deepcopy(attributes, kept)


def set_back_component(component: Any, before: Attributes) -> None:
    """Restore a component's attributes from a snapshot, and delete attributes added later.

    Args:
        component: Scheduler, guider or denoiser.
        before: Result of `snapshot_component` for this component.
    """
    modules = modules_of(component)
    for name, attributes in attributes_of(component).items():
        for added in attributes.keys() - before[name].keys():
            object.__delattr__(modules[name], added)
        # An unchanged list stays in place, because two attributes may share it. With two equal
        # lists instead of a shared one, the next packet would be different.
        vars(modules[name]).update(
            (key, value)
            for key, value in before[name].items()
            if key not in attributes or not is_unchanged(value, attributes[key])
        )


def pack_changed_attributes(
    packer: StatePacker,
    attributes: Mapping[str, Attributes],
    before: Mapping[str, Attributes],
    *,
    denoisers: Collection[str],
) -> dict[str, Any]:
    """Pack the attributes of components that steps have changed, and return their structure.

    Args:
        packer: Packer of the packet (the clip's state for the next rank).
        attributes: Current attributes of each component, by the component's name.
        before: Attributes of each component before the call.
        denoisers: Names of the denoisers. A denoiser's attribute of a type that cannot be sent is
            left out, because such an attribute is only a cache, which the denoiser computes again.
            Tests that split a clip after each step would fail if it were more than a cache.

    Raises:
        ModelError: A component that is not a denoiser has a changed attribute of a type that cannot
            be sent.
    """
    packed: dict[str, Any] = {}
    for part, modules in attributes.items():
        packed_modules = {}
        for module, values in modules.items():
            known = before[part].get(module, {})
            nodes = {}
            for name, value in values.items():
                if name in known and is_unchanged(known[name], value):
                    continue
                if part in denoisers and not _is_packable(packer, value):
                    continue
                label = ".".join(filter(None, (part, module, name)))
                nodes[name] = packer.pack(value, label)
            if nodes:
                packed_modules[module] = nodes
        if packed_modules:
            packed[part] = packed_modules
    return packed


def _is_packable(packer: StatePacker, value: Any) -> bool:
    try:
        packer.describe(value)
    except ModelError:
        return False
    return True
