"""Conversion of a modular pipeline's state to named tensors and a structure (JSON), and back.

One rank sends both to the next in a packet. The state of a modular pipeline has more kinds of
values than the results that `records` packs: random generators, dtypes, NumPy arrays, schedulers,
and objects of diffusers and transformers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch

from svdpp.errors import ModelError
from svdpp.models.base import Tensors
from svdpp.models.engine.hooks import HOOK
from svdpp.models.engine.records import (
    Node,
    Packer,
    class_path,
    is_of_library,
    library_class,
    unpack_tensor,
    unsendable_error,
    zero_tensor,
)

_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", torch.Size: "size"}
_MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "size": torch.Size,
}


class AbsentValue:
    """Placeholder for a value that a packet lacks, such as an image that is already encoded.

    The placeholder is not None, so conditional blocks choose the same branch as with the value. Any
    other use of the placeholder raises `ModelError`.

    Args:
        description: Name and class of the value.
    """

    def __init__(self, description: str) -> None:
        object.__setattr__(self, "description", description)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        description = object.__getattribute__(self, "description")
        raise ModelError(
            f"a step or the decode reads {description}, which was not sent to this rank",
            details={"value": description},
        )

    __getattr__ = __len__ = __iter__ = __getitem__ = __call__ = _refuse
    __bool__ = __add__ = __eq__ = _refuse
    __hash__ = object.__hash__

    def __deepcopy__(self, memo: Any) -> AbsentValue:
        return self


class StatePacker(Packer):
    """Packer that can pack all kinds of values in a modular pipeline's state.

    An object that occurs several times is packed once, and is one object again on the next rank.

    Args:
        components: Components of the pipeline by name. If a value is a component, only its name is
            packed, because every rank has the component.
        keeps: Whether the packer collects the tensors of the values, to be sent. False: it only
            returns the structures of the values (JSON, with the tensors' shapes).
    """

    def __init__(self, components: dict[str, Any], *, keeps: bool = True) -> None:
        super().__init__(keeps=keeps)
        named = {name: each for name, each in components.items() if each is not None}
        self._components = {id(each): name for name, each in named.items()}
        # Numbers of packed objects, by Python's `id`. `_objects` keeps the objects alive, because
        # Python may give the id of a deleted object to a new one.
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []
        self._storages: set[int] = set()

    def pack(self, value: Any, name: str, *, may_be_absent: bool = False) -> Node:
        """Return the structure (JSON) of a value for a packet; keep its tensors in `tensors`.

        Args:
            value: Value of the pipeline's state, or of a component's `__dict__`.
            name: Prefix for the names of the tensors.
            may_be_absent: Whether an object of a type that cannot be sent becomes an `AbsentValue`
                on the next rank.

        Raises:
            ModelError: The value is of a type that cannot be sent.
        """

        def part(value: Any, key: object) -> Node:
            return self.pack(value, f"{name}.{key}", may_be_absent=may_be_absent)

        if id(value) in self._components:
            return {"kind": "component", "name": self._components[id(value)]}
        if type(value) is AbsentValue:
            return self.absent(name, value)
        if value is None or type(value) in (bool, int, float, str):
            return {"kind": "plain", "value": value}
        if isinstance(value, torch.Tensor):
            return self._pack_tensor(value, name)
        if isinstance(value, torch.dtype):
            return {"kind": "dtype", "value": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"kind": "device", "is_host": value.type == "cpu"}
        if isinstance(value, enum.Enum) and is_of_library(type(value)):
            return {"kind": "enum", "class": class_path(type(value)), "value": value.value}
        if type(value) in (tuple, set, torch.Size):
            items = [part(each, place) for place, each in enumerate(value)]
            return {"kind": _SEQUENCES[type(value)], "items": items}
        if (make := self._structure_of(value, part)) is not None:
            return self._pack_once(value, make)
        if may_be_absent:
            return self.absent(name, value)
        raise unsendable_error(name, value)

    def absent(self, name: str, value: Any) -> Node:
        """Return the structure of an `AbsentValue` that stands for a value.

        Args:
            name: Name of the value, for errors.
            value: Value that the packet lacks, or the `AbsentValue` that already stands for it.
        """
        if type(value) is AbsentValue:
            description = object.__getattribute__(value, "description")
        else:
            description = f"{name} (a {type(value).__name__})"
        return {"kind": "absent", "description": description}

    def describe(self, value: Any) -> Node:
        """Return the structure (JSON) of a value without keeping its tensors for the packet."""
        return StatePacker({}, keeps=False).pack(value, "value")

    def _pack_tensor(self, tensor: torch.Tensor, name: str) -> Node:
        if tensor.dim() == 0:
            # Pack each scalar under its own name, even if it occurs twice. Two schedulers may share
            # one tensor for a timestep, or have two equal tensors if one scheduler is from a
            # packet. The next packet must be the same in both cases.
            tensor = tensor.view(())
        node = super()._pack_tensor(tensor, name)
        kept = self.tensors.get(name)
        if kept is not None and node["name"] == name:
            # Packets are also saved as latent checkpoints. Their format, safetensors, cannot store
            # two tensors that share memory. So a tensor that is a view of another one, such as a
            # slice of a scheduler's timesteps, is copied.
            storage = kept.untyped_storage()._cdata
            if storage in self._storages:
                self.tensors[name] = kept.clone()
            self._storages.add(storage)
        return node

    def _structure_of(
        self, value: Any, part: Callable[[Any, object], Node]
    ) -> Callable[[], Node] | None:
        """Return a function that packs a list, dict, array, generator or library object.

        The caller calls the function only if it has not packed the same value before.

        Args:
            value: Value to pack.
            part: Function that packs a part of the value, given the part and its name or index.

        Returns:
            Function that returns the structure of the value; None for values of other classes.
        """
        kind = type(value)
        if isinstance(value, torch.Generator):
            is_host = value.device.type == "cpu"
            return lambda: {
                "kind": "generator",
                "is_host": is_host,
                "state": part(value.get_state(), "state"),
            }
        if isinstance(value, (np.generic, np.ndarray)) and value.dtype.kind in "fiub":
            is_scalar = isinstance(value, np.generic)
            return lambda: {
                "kind": "array",
                "is_scalar": is_scalar,
                "array": part(torch.from_numpy(np.array(value)), "array"),
            }
        if kind is list:
            return lambda: {
                "kind": "list",
                "items": [part(each, place) for place, each in enumerate(value)],
            }
        if isinstance(value, dict) and (kind is dict or is_of_library(kind)):
            return lambda: {
                "kind": "dict",
                "class": None if kind is dict else class_path(kind),
                "items": [[part(key, "key"), part(each, key)] for key, each in value.items()],
            }
        if is_of_library(kind) and hasattr(value, "__dict__") and not _computes(value):
            return lambda: {
                "kind": "object",
                "class": class_path(kind),
                "items": [
                    [key, part(each, key)]
                    for key, each in vars(value).items()
                    if key == _CONFIG or key not in NOT_STATE
                ],
            }
        return None

    def _pack_once(self, value: Any, make: Callable[[], Node]) -> Node:
        if id(value) in self._numbers:
            return {"kind": "same", "id": self._numbers[id(value)]}
        number = self._numbers[id(value)] = len(self._numbers)
        self._objects.append(value)
        return {**make(), "id": number}


#: Name of the attribute with an object's config. Objects such as a copy of the scheduler are packed
#: with their config. Components are packed without it, because every rank has the config.
_CONFIG = "_internal_dict"
#: Attributes that the engine, torch or diffusers add to objects, and that are not state.
NOT_STATE = frozenset({"_parameters", "_modules", HOOK, _CONFIG, "forward", "_diffusers_hook"})


class StateUnpacker:
    """Unpacker that rebuilds the values of a modular pipeline's state from a packet.

    Args:
        tensors: Tensors of the packet, by name.
        components: Components of this rank's pipeline, by name.
        device: Device of this rank.
        zeros: Whether tensors that the packet describes without data become zeros. Otherwise all
            their elements become NaN (0 for integers), expanded from one element, so that they
            take almost no memory.
    """

    def __init__(
        self,
        tensors: Tensors,
        components: dict[str, Any],
        device: torch.device,
        *,
        zeros: bool = False,
    ) -> None:
        self._tensors, self._components, self._device = tensors, components, device
        self._zeros = zeros
        self._made: dict[str, torch.Tensor] = {}
        self._objects: dict[int, Any] = {}
        #: Generators in the order in which they were unpacked.
        self.generators: list[torch.Generator] = []

    def get(self, node: Node) -> Any:
        """Rebuild a value from its structure, with copies of the packet's tensors.

        Raises:
            ValueError: The structure names a class that is not from diffusers or transformers.
        """
        match node["kind"]:
            case "plain":
                return node["value"]
            case "tensor":
                return self._tensor(node)
            case "component":
                return self._components[node["name"]]
            case "same":
                return self._objects[node["id"]]
            case "absent":
                return AbsentValue(node["description"])
            case "dtype":
                return getattr(torch, node["value"])
            case "device":
                return torch.device("cpu") if node["is_host"] else self._device
            case "enum":
                return library_class(node["class"])(node["value"])
            case "tuple" | "set" | "size" as kind:
                return _MAKERS[kind]([self.get(each) for each in node["items"]])
        return self._object(node)

    def _object(self, node: Node) -> Any:
        """Rebuild an object from a packet, and store it by its number.

        If the object occurs again in the packet, a node of the kind `same` has only this number.
        """
        value: Any
        if node["kind"] == "generator":
            value = torch.Generator("cpu" if node["is_host"] else self._device)
            value.set_state(self.get(node["state"]))
            self.generators.append(value)
        elif node["kind"] == "array":
            array = self.get(node["array"]).numpy()
            value = array[()] if node["is_scalar"] else array
        elif node["kind"] == "list":
            # Register the list before its items are rebuilt, because an item may refer to the list.
            value = self._objects[node["id"]] = []
            value.extend(self.get(each) for each in node["items"])
        elif node["kind"] == "dict":
            items = {self.get(key): self.get(each) for key, each in node["items"]}
            kind = dict if node["class"] is None else library_class(node["class"])
            value = kind(**items) if is_dataclass(kind) else kind(items)
        else:
            kind = library_class(node["class"])
            value = self._objects[node["id"]] = kind.__new__(kind)
            for key, each in node["items"]:
                object.__setattr__(value, key, self.get(each))
        self._objects[node["id"]] = value
        return value

    def _tensor(self, node: Node) -> torch.Tensor:
        name = node["name"]
        if name is None and self._zeros:
            return zero_tensor(node, self._device)
        if name is None:
            return unpack_tensor(node, {}, self._device)
        if name not in self._made:
            self._made[name] = unpack_tensor(node, self._tensors, self._device)
        return self._made[name]


def _computes(value: Any) -> bool:
    """Whether a value is a module or has a `forward`; such values are never sent in packets."""
    return isinstance(value, torch.nn.Module) or callable(getattr(value, "forward", None))
