"""Record and replay of the results of a pipeline's methods.

The pipeline call that encodes records the results. All later calls, on any rank, replay them. To do
so, methods of the pipeline and of its components are replaced during a call. A packet, which one
rank sends to the next, contains the results as named tensors and a structure. The structure is JSON
with the plain values, and with the name, shape, dtype and strides of each tensor.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.utils import BaseOutput
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map_only
from transformers.utils import ModelOutput

from svdpp.config.families.spec import FamilySpec
from svdpp.errors import ModelError
from svdpp.models.base import LATENTS, STRUCTURE, Tensors
from svdpp.models.engine.hooks import HOOK

#: Node of a structure: a JSON object for a tensor, a plain value or a container. The key `kind`
#: says which of the three the node describes, and so which other keys the node has.
Node = dict[str, Any]

# Attributes of a scheduler that are not part of its state: the first is set by svdpp's hooks, the
# second by diffusers.
_NOT_STATE = (HOOK, "_internal_dict")
# Packages whose classes a packet may name.
_LIBRARIES = ("diffusers", "transformers")

# Pipeline method whose result contains the initial latent as the first tensor.
_NOISE_RECORD = "prepare_latents"
# Methods that prepare images for the encode. Steps and decode do not use their results, so packets
# do not contain them.
_UNUSED = (
    *("video_processor.preprocess", "video_processor.preprocess_video"),
    "preprocess_conditions",  # prepares the images of `WanVACEPipeline`
)

_METHODS = ("forward", "encode", "decode", "get_image_features", "get_text_features")
_PREPROCESS = ("preprocess", "preprocess_video")
_NOT_RECORDED = ("__init__", "__call__", "check_inputs", "progress_bar")

# The memory estimate finds tensors only in classes that torch's pytree knows. diffusers and
# transformers register their output classes, but not `DiagonalGaussianDistribution`.
register_pytree_node(
    DiagonalGaussianDistribution,
    lambda value: ([value.parameters], value.deterministic),
    lambda parts, fixed: DiagonalGaussianDistribution(*parts, fixed),
)


class Packer:
    """Converter of values to the contents of a packet: a structure (JSON) and named tensors.

    A structure is a tree of JSON objects, one for each container, plain value and tensor in the
    value. The object of a tensor has only the tensor's name, shape, dtype and strides. The tensor
    itself is kept in `tensors` under this name; a tensor that occurs several times is kept once. If
    `keeps` is False, the packer keeps no tensors, and the tensors in a structure have no names.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self.tensors: Tensors = {}
        self._keeps = keeps
        self._sources: dict[str, torch.Tensor] = {}

    def pack(self, value: Any, name: str) -> Node:
        """Return the structure (JSON) of a value for a packet; keep its tensors in `tensors`.

        Args:
            value: Tensors and plain values in nested lists, tuples, dicts and output classes of
                diffusers or transformers.
            name: Prefix for the names of the tensors.

        Raises:
            ModelError: The value contains an object of a type that cannot be sent.
        """
        if isinstance(value, torch.Tensor):
            return self._pack_tensor(value, name)
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"kind": "plain", "value": value}
        if type(value) in (list, tuple):
            items = [self.pack(each, f"{name}.{index}") for index, each in enumerate(value)]
            return {"kind": type(value).__name__, "items": items}
        if not (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
            raise unsendable_error(name, value)
        node = {"items": {key: self.pack(each, f"{name}.{key}") for key, each in value.items()}}
        if isinstance(value, (BaseOutput, ModelOutput)):
            return {"kind": "output", "class": class_path(type(value)), **node}
        return {"kind": "dict", **node}

    def _pack_tensor(self, tensor: torch.Tensor, name: str) -> Node:
        dtype = str(tensor.dtype).removeprefix("torch.")
        node = {"kind": "tensor", "shape": list(tensor.shape), "dtype": dtype}
        if not self._keeps:
            return {**node, "name": None, "stride": None}
        same = (known for known, each in self._sources.items() if each is tensor)
        if (known := next(same, None)) is None:
            known = name
            self._sources[name], self.tensors[name] = tensor, tensor.contiguous()
        # The strides are sent, because the bits of a kernel's result may depend on the order of the
        # elements in memory. Gaps between elements, as in a slice of a larger tensor, are removed.
        dense = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
        stride = None if dense.is_contiguous() else list(dense.stride())
        return {**node, "name": known, "stride": stride}

    def packet(self, structure: Node) -> Tensors:
        """Return a packet: the kept tensors by name, and the structure (JSON in a uint8 tensor)."""
        text = json.dumps(structure, separators=(",", ":"))
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return {**self.tensors, STRUCTURE: data}


def read_structure(packet: Tensors) -> Node:
    """Parse the structure of a packet from the packet's JSON.

    Args:
        packet: Result of `Packer.packet`. The structure refers to its tensors by name.
    """
    assert packet[STRUCTURE].is_cpu
    structure: Node = json.loads(packet[STRUCTURE].numpy().tobytes())
    return structure


def pack_structure(value: Any) -> Node:
    """Return the structure (JSON) of a value whose tensors are not sent, so they have no names."""
    return Packer(keeps=False).pack(value, "value")


def unpack(node: Node, tensors: Tensors, device: torch.device) -> Any:
    """Rebuild a value from its structure, with copies of the packet's tensors.

    Args:
        node: Structure of the value. If a tensor in it has no name, the packet lacks the tensor.
            All its elements then become NaN (0 for integers), expanded from one element, so that
            it takes almost no memory.
        tensors: Tensors of the packet, by name.
        device: Device of tensors that the packet lacks.

    Raises:
        ValueError: The structure names a class other than the output classes of diffusers and
            transformers.
    """
    return _build(node, lambda leaf: unpack_tensor(leaf, tensors, device))


def unpack_tensor(leaf: Node, tensors: Tensors, device: torch.device) -> torch.Tensor:
    """Rebuild a tensor of a packet from its node in the structure; see `unpack`."""
    if leaf["name"] is None:
        dtype = getattr(torch, leaf["dtype"])
        number = torch.nan if dtype.is_floating_point else 0
        return torch.full((), number, dtype=dtype, device=device).expand(leaf["shape"])
    source = tensors[leaf["name"]]
    if leaf["stride"] is None:
        return source.clone()
    return source.new_empty_strided(leaf["shape"], leaf["stride"]).copy_(source)


def zeros_for(node: Node, device: torch.device) -> Any:
    """Rebuild a value from its structure (JSON), with zeros on a device in place of tensors."""
    return _build(node, lambda leaf: zero_tensor(leaf, device))


def zero_tensor(leaf: Node, device: torch.device) -> torch.Tensor:
    """Return zeros with the shape, dtype and strides in a tensor's node of a structure."""
    shape, stride = leaf["shape"], leaf["stride"]
    made = torch.zeros(shape, dtype=getattr(torch, leaf["dtype"]), device=device)
    return made if stride is None else made.as_strided(shape, stride)


def leaves(node: Node) -> list[Node]:
    """Return the nodes of a packet's structure that describe tensors, in order."""
    if node["kind"] == "tensor":
        return [node]
    items = node.get("items", [])
    parts = items.values() if isinstance(items, dict) else items
    return [leaf for part in parts for leaf in leaves(part)]


def named_tensors(structure: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of every tensor that a packet's structure names, by name.

    Args:
        structure: Structure of a packet, or a part of such a structure.
    """
    if isinstance(structure, list):
        parts = structure
    elif isinstance(structure, dict):
        if structure.get("kind") == "tensor":
            known = tuple(structure["shape"]), getattr(torch, structure["dtype"])
            return {} if structure["name"] is None else {structure["name"]: known}
        parts = list(structure.values())
    else:
        return {}
    return {name: known for part in parts for name, known in named_tensors(part).items()}


def _build(node: Node, tensor: Any) -> Any:
    match node["kind"]:
        case "tensor":
            return tensor(node)
        case "plain":
            return node["value"]
        case "list":
            return [_build(each, tensor) for each in node["items"]]
        case "tuple":
            return tuple(_build(each, tensor) for each in node["items"])
    items = {key: _build(each, tensor) for key, each in node["items"].items()}
    return items if node["kind"] == "dict" else _output_class(node["class"])(**items)


def _output_class(path: str) -> Any:
    """Return the output class of diffusers or transformers at `path` (module:name).

    Raises:
        ValueError: The path does not name an output class of these libraries.
    """
    cls = library_class(path)
    if not issubclass(cls, OrderedDict):
        raise ValueError(f"a packet names the class {path}, which is not allowed")
    return cls


def unsendable_error(name: str, value: Any) -> ModelError:
    """Return the error for a value of a type that a packet cannot contain.

    Args:
        name: Name of the value in the packet.
        value: Value of any type.
    """
    kind = type(value).__name__
    return ModelError(
        f"{name} is a {kind}, which svdpp cannot send to another rank",
        details={"name": name, "type": kind},
    )


def is_of_library(cls: type) -> bool:
    """Whether a packet may name a class: only classes of diffusers and transformers are allowed."""
    return cls.__module__.split(".")[0] in _LIBRARIES


def class_path(cls: type) -> str:
    """Return the path of a class (module:name), by which `library_class` finds it."""
    return f"{cls.__module__}:{cls.__qualname__}"


def library_class(path: str) -> Any:
    """Return the class of diffusers or transformers at `path` (module:name).

    Raises:
        ValueError: The path names no class of these libraries. Modules of other packages are never
            imported.
    """
    module, _, name = path.partition(":")
    found: Any = None
    if module.split(".")[0] in _LIBRARIES:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    if not isinstance(found, type):
        raise ValueError(f"a packet names the class {path}, which is not allowed")
    return found


def snapshot_attributes(value: Any, ignored: Collection[str] = ()) -> dict[str, Any]:
    """Return a copy of an object's `__dict__`, to find out later which attributes have changed.

    Args:
        value: Object with attributes.
        ignored: Names of attributes that are left out.
    """
    return {
        key: copy.copy(each) if isinstance(each, (list, dict)) else each
        for key, each in vars(value).items()
        if key not in ignored
    }


def scheduler_changes(before: Mapping[str, Any], scheduler: Any) -> dict[str, Any]:
    """Return the attributes of a scheduler that `scheduler.step` has changed, by name.

    Args:
        before: Result of `snapshot_attributes` for the scheduler.
        scheduler: Scheduler after some steps.
    """
    return {
        key: value
        for key, value in scheduler.__dict__.items()
        if key not in _NOT_STATE and not (key in before and is_unchanged(before[key], value))
    }


def is_unchanged(before: Any, now: Any) -> bool:
    """Whether an attribute of a component still has its earlier value.

    A value counts as unchanged if it is the same object, an equal plain value, or a list, tuple,
    dict or dataclass of unchanged values.

    Args:
        before: Earlier value.
        now: Current value.
    """
    if type(before) is not type(now):
        return False
    if isinstance(before, (list, tuple)):
        return len(before) == len(now) and all(map(is_unchanged, before, now))
    if isinstance(before, dict):
        same_keys = before.keys() == now.keys()
        return same_keys and all(is_unchanged(before[key], now[key]) for key in before)
    if is_dataclass(before):
        return is_unchanged(vars(before), vars(now))
    return before is now or (isinstance(before, (int, float, str)) and bool(before == now))


#: Largest number of axes of a latent: batch, channels, frames, height and width.
_LATENT_AXES = 5


def step_latent(result: Any) -> torch.Tensor:
    """Return the latent in the result of a modular pipeline's `scheduler.step`.

    Some pipelines add a second batch axis to the latent, which this function removes.

    Args:
        result: Tensor, or tuple or dataclass that contains the latent as its first tensor.

    Returns:
        Latent, of shape (B, C, F, H, W) or with fewer axes.
    """
    latent = tensors_in(result)[0]
    return latent.squeeze(0) if latent.ndim > _LATENT_AXES else latent


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors, of any shape and dtype, in a value of nested containers."""
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


def clone_tensors(value: Any) -> Any:
    """Return a copy of nested containers in which each tensor is copied with the same strides."""
    return tree_map_only(torch.Tensor, torch.clone, value)


def tensors_differ(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    """Whether two lists of equal length have different tensors at any position.

    Args:
        before: Tensors of any shapes and dtypes.
        after: Tensors to compare with those of `before`; the lists have equal length.
    """
    return not all(map(torch.equal, before, after))


# The pipeline call that encodes records the result of each method until the denoiser's first call.
# The table lists the methods of Stable Video Diffusion in order, and the names of the tensors in a
# packet with the results:
#
#   method                       before step 0          after a step
#   _encode_image                record.0               record.0
#   video_processor.preprocess   -  (no step uses it)   -
#   _encode_vae_image            record.2               record.2
#   _get_add_time_ids            record.3               record.3
#   prepare_latents              latents, drew.4.0      latents, generator.0
#
# `prepare_latents` draws noise, so the packet also has `drew.4.0`, the state of the generator after
# this method. After a step, `latents` is the new latent, and `generator.0` is the generator's state
# after the step.
#
# Later pipeline calls return these records by method name, in order, and need no encoder. If a
# recorded method calls another method, the inner method is not recorded, because the replay of the
# outer method does not call it. A method that returns no tensor and draws no noise is not recorded
# but runs again in later calls, because it is cheap and may set attributes of the pipeline.


@dataclass(eq=False)
class Records:
    """Results of a pipeline's methods, recorded during the encode and replayed by later calls."""

    spec: FamilySpec
    unpacked: Callable[[Node], Any]
    """Function that rebuilds a value from a node of the packet's structure."""
    generator: torch.Generator
    given: list[Node] | None
    """Records in the received packet. None: this pipeline call encodes, and records the methods'
    results itself."""
    paused: bool = False
    """Whether methods run as usual, without record or replay, as they do in denoising steps."""

    def __post_init__(self) -> None:
        self._left = list(self.given or ())
        self._made: list[tuple[str, Any, torch.Tensor | None]] = []

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method: the encode records its results, and later pipeline calls replay them.

        Args:
            name: Name of the method in records, such as `vae.encode`.
            real: Method of the pipeline or of a component.
        """

        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.paused or self.spec.record_uses.get(name) == "recomputed":
                return real(*args, **kwargs)
            if self.given is not None:
                return self._replay(name, real, args, kwargs)
            before = self.generator.get_state()
            self.paused = True
            result = real(*args, **kwargs)
            self.paused = False
            after = self.generator.get_state()
            drew = not torch.equal(before, after)
            if drew or tensors_in(result):
                self._made.append((name, clone_tensors(result), after if drew else None))
            return result

        return call

    def _replay(self, name: str, real: Any, args: Any, kwargs: Any) -> Any:
        record = next((each for each in self._left if each["name"] == name), None)
        if record is None:
            # The encode has not recorded this call, because it returns no tensor and draws no
            # noise. Such methods run again.
            return real(*args, **kwargs)
        self._left.remove(record)
        if record["drew"] is not None:
            self.restore(record["drew"])
        return self.unpacked(record["result"])

    def restore(self, states: Node) -> None:
        """Set a clip's random generator to the state that an earlier rank has sent.

        Args:
            states: Part of the packet's structure that names the tensor with the state.
        """
        (state,) = self.unpacked(states)
        self.generator.set_state(state)

    def packed(self, packer: Packer) -> list[Node]:
        """Pack the encode's recorded results; return the method and structure of each result.

        Args:
            packer: Packer that receives the tensors of the results, except tensors that no step
                uses. The initial latent gets the name `latents`.
        """
        for name, result, _ in self._made:
            if name == _NOISE_RECORD:
                packer.pack(tensors_in(result)[0], LATENTS)
        records, calls = [], Counter[str]()
        for place, (name, result, drew) in enumerate(self._made):
            use = self.spec.record_uses.get(name, "unused" if name in _UNUSED else None)
            is_sent = use == calls[name] if isinstance(use, int) else use != "unused"
            calls[name] += 1
            node = packer.pack(result, f"record.{place}") if is_sent else pack_structure(result)
            state = None if drew is None else packer.pack([drew], f"drew.{place}")
            records.append({"name": name, "result": node, "drew": state})
        return records

    def passed_on(self, received: Tensors, tensors: Tensors) -> list[Node]:
        """Pass the received records of the encode on to the next packet, and return them.

        Tensors that only step 0 uses are left out.

        Args:
            received: Tensors of the received packet.
            tensors: Tensors of the next packet, to which the tensors of the returned records are
                added.
        """
        records = copy.deepcopy(self.given or [])
        for record in records:
            # The next packet has the generator's state after the steps, so the state after this
            # method is not needed any more.
            record["drew"] = None
            for leaf in leaves(record["result"]):
                name = leaf["name"]
                if name == LATENTS:
                    leaf["name"] = self.spec.initial_latent_source
                elif self.spec.record_uses.get(record["name"]) == "first step":
                    leaf["name"] = None
                if leaf["name"] not in (None, LATENTS):
                    tensors[leaf["name"]] = received[name]
        return records


@contextmanager
def patch_methods(target: Any, **methods: Any) -> Iterator[None]:
    """Replace methods of one pipeline or component while the `with` block runs.

    Args:
        target: Pipeline, or a part of a pipeline. Other objects of the same class do not change.
        methods: New methods by name.
    """
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
    """Return the methods of a pipeline's component that are recorded and replayed, by name."""
    names = _METHODS if isinstance(component, torch.nn.Module) else _PREPROCESS
    return {name: getattr(component, name) for name in names if hasattr(component, name)}


@functools.cache
def pipeline_methods(pipeline_class: Any) -> tuple[str, ...]:
    """Return the names of a pipeline class's methods that can be replayed on another rank.

    One rank records the results of such a method, and later ranks return them without running it.
    The result leaves out the methods that pipelines inherit from `DiffusionPipeline`, and the
    methods `__init__`, `__call__`, `check_inputs` and `progress_bar`.
    """
    names: dict[str, Any] = {}
    for cls in pipeline_class.__mro__:
        is_own = cls.__module__.startswith("diffusers.pipelines")
        names |= vars(cls) if is_own and cls not in DiffusionPipeline.__mro__ else {}
    return tuple(
        name
        for name, value in names.items()
        if callable(getattr(value, "__func__", value)) and name not in _NOT_RECORDED
    )
