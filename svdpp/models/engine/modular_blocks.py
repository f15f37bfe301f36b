"""Functions for a modular pipeline's tree of blocks, and for the values of a `BlockState`.

The sub-blocks of a loop share one `BlockState`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import (
    BlockState,
    ConditionalPipelineBlocks,
    LoopSequentialPipelineBlocks,
    SequentialPipelineBlocks,
)

from svdpp.models.engine.records import is_unchanged, tensors_in

# --- the tree of blocks ---------------------------------------------------------------------------


def _is_leaf(block: Any) -> bool:
    """Whether a modular pipeline's block is a leaf: a loop, or a block without sub-blocks."""
    return isinstance(block, LoopSequentialPipelineBlocks) or not block.sub_blocks


def leaf_blocks(block: Any, around: tuple[Any, ...] = ()) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return all leaves of a modular pipeline's tree of blocks, each with its containers.

    Args:
        block: Root of the tree.
        around: Blocks that contain the root, outermost first.

    Returns:
        (leaf, containers) pairs in order, with the outermost container first. Leaves in all
        branches of conditional blocks are included.
    """
    if _is_leaf(block):
        return [(block, around)]
    containers = (*around, block)
    return [leaf for each in block.sub_blocks.values() for leaf in leaf_blocks(each, containers)]


def repeats_blocks(block: Any) -> bool:
    """Whether a modular pipeline's block has its own `__call__`, which may repeat sub-blocks."""
    own = type(block).__call__ is not SequentialPipelineBlocks.__call__
    return isinstance(block, SequentialPipelineBlocks) and own


def is_in_other_branch(path: Sequence[Any], chosen: Sequence[Any]) -> bool:
    """Whether two blocks of a modular pipeline are in different branches of a conditional block.

    Only one of the branches runs, so the first block does not run if the second block runs.

    Args:
        path: Containers of the first block, from the outermost, and then the block itself.
        chosen: Containers of the second block, and then the block itself.
    """
    same = [one is other for one, other in zip(path, chosen, strict=False)]
    place = same.index(False) if False in same else 0
    return place > 0 and isinstance(path[place - 1], ConditionalPipelineBlocks)


def denoising_loops(pipe: Any, denoisers: Collection[str]) -> list[Any]:
    """Return the denoising loops among a modular pipeline's blocks, in all branches.

    Args:
        pipe: Modular pipeline of diffusers.
        denoisers: Names of the pipeline's denoisers.
    """
    return [leaf for leaf, _ in leaf_blocks(pipe._blocks) if is_denoising_loop(leaf, denoisers)]


def is_denoising_loop(block: Any, denoisers: Collection[str]) -> bool:
    """Whether a modular pipeline's block is a loop of sub-blocks, one of which calls a denoiser."""
    return isinstance(block, LoopSequentialPipelineBlocks) and uses_denoisers(block, denoisers)


def uses_denoisers(block: Any, denoisers: Collection[str]) -> bool:
    """Whether a modular pipeline's block declares that it uses a denoiser."""
    return any(name in denoisers for name in block.component_names)


def names_read(
    blocks: Any, block: Any, kwargs_mapping: Mapping[str, list[str]]
) -> tuple[set[str], set[str]]:
    """Return the names of values that a modular pipeline's block and later blocks read.

    Args:
        blocks: Tree of blocks of a pipeline.
        block: Leaf of the tree: a block without sub-blocks, or a loop.
        kwargs_mapping: `kwargs_mapping` of the `PipelineState`. It maps a kind of keyword arguments
            to the names of the values of this kind.

    Returns:
        Names of the inputs; and names of the values by whose presence conditional blocks choose a
        branch.
    """
    leaves = leaf_blocks(blocks)
    first = next(index for index, (leaf, _) in enumerate(leaves) if leaf is block)
    # A container that repeats the block may run earlier blocks again, which read values, too.
    repeating = [each for each in leaves[first][1] if repeats_blocks(each)]
    for index, (_, containers) in enumerate(leaves):
        if any(each in repeating for each in containers):
            first = min(first, index)
    path = next((*containers, leaf) for leaf, containers in leaves if leaf is block)
    names, triggers = set[str](), set[str]()
    for leaf, containers in leaves[first:]:
        if not repeating and is_in_other_branch((*containers, leaf), path):
            continue
        for each in (leaf, *containers):
            triggers.update(filter(None, getattr(each, "block_trigger_inputs", ())))
            if each is not leaf and each not in repeating:
                continue
            for value in each.inputs:
                names.update(filter(None, (value.name,)))
                names.update(kwargs_mapping.get(value.kwargs_type, ()))
    return names, triggers


# --- the values of a BlockState -------------------------------------------------------------------


class SubBlockEntry:
    """Snapshot of a `BlockState` at the start of a sub-block, from which the sub-block can rerun.

    Args:
        values: Values of the `BlockState` by name. If some of them are random generators, the
            snapshot includes the generators' states.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = dict(values)
        self.generators = [each.get_state() for each in generators_in(values)]
        self._copies = {
            name: copy.copy(each) if isinstance(each, (list, dict)) else each
            for name, each in values.items()
        }
        self._versions = {
            name: [each._version for each in tensors_in(value)] for name, value in values.items()
        }

    def changed_in_place(self) -> str | None:
        """Return the name of a value changed in place since this snapshot; None: no value was."""
        for name, value in self.values.items():
            versions = [each._version for each in tensors_in(value)]
            if versions != self._versions[name] or not is_unchanged(self._copies[name], value):
                return name
        return None


def traced_block_state(first_uses: dict[str, str]) -> Any:
    """Return a subclass of `BlockState` that records the first use of each attribute.

    Args:
        first_uses: Dict to which each attribute's name is added when the attribute is used for the
            first time. The value is "read" or "written".
    """

    class Traced(BlockState):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name == "__dict__":  # `as_dict` reads `__dict__`, and so all values
                for each in object.__getattribute__(self, name):
                    first_uses.setdefault(each, "read")
            elif not name.startswith("__"):
                first_uses.setdefault(name, "read")
            return object.__getattribute__(self, name)

        def __setattr__(self, name: str, value: Any) -> None:
            first_uses.setdefault(name, "written")
            object.__setattr__(self, name, value)

    return Traced


def values_of(block_state: Any) -> dict[str, Any]:
    """Return the values of a `BlockState`, without recording that they were read."""
    values: dict[str, Any] = object.__getattribute__(block_state, "__dict__")
    return values


def same_in(values: Mapping[str, Any], tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in `values` that shares memory and shape with `tensor`, or else `tensor`.

    Several Python objects can stand for one tensor: they have the same storage, shape and strides.
    The packer would pack each of these objects. If the caller packs the returned object instead of
    `tensor`, and later packs `values`, the packer meets the same object, and packs it only once.
    """
    for value in values.values():
        if isinstance(value, torch.Tensor) and value.is_set_to(tensor):
            return value
    return tensor


def generators_in(values: Mapping[str, Any]) -> list[torch.Generator]:
    """Return the random generators among the values of a block's state, without duplicates."""
    found = {}
    for value in values.values():
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Generator):
                found[id(each)] = each
    return list(found.values())
