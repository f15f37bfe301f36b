"""What a pipeline's call does outside its steps: recorded once, and replayed by all later ranks."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from svdpp.models.base import LATENTS, Tensors
from svdpp.models.engine.rows import Row
from svdpp.models.engine.values import (
    Node,
    Packer,
    copied,
    describe,
    differ,
    has_tensors,
    leaves,
    tensors_in,
)

# The record whose first tensor is the latent before the first step.
_NOISE_RECORD = "prepare_latents"
# What the noise is called in a packet after the first step.
_NOISE = {"first_step": None, "in_latents": LATENTS, "later_steps": "noise"}


class Records:
    """What methods of the pipeline and of its components return, and states of its generators.

    Args:
        row: of the family.
        unpacked: the value of a node of the packet.
        generators: of the clip.
        given: the structure of the packet; None: this call records.
    """

    def __init__(
        self,
        row: Row,
        unpacked: Callable[[Node], Any],
        generators: Sequence[torch.Generator],
        given: Node | None,
    ) -> None:
        self.in_steps = False
        """While it is true, nothing is recorded or replayed."""
        self._row, self._unpacked, self._generators = row, unpacked, generators
        self._given = given
        self._queues: dict[str, list[Node]] = {}
        for record in given["records"] if given else ():
            self._queues.setdefault(record["name"], []).append(record)
        self._records: list[tuple[str, Any, list[torch.Tensor] | None]] = []
        self._depth = 0

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """`real`, whose calls are recorded or replayed."""

        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth or self.in_steps:
                return real(*args, **kwargs)
            if self._given is not None:
                return self._replay(name, real, args, kwargs)
            before = self.generator_states()
            self._depth += 1
            try:
                result = real(*args, **kwargs)
            finally:
                self._depth -= 1
            after = self.generator_states()
            drew = differ(before, after)
            if drew or has_tensors(result):
                self._records.append((name, copied(result), after if drew else None))
            return result

        return call

    def _replay(self, name: str, real: Any, args: Any, kwargs: Any) -> Any:
        if not self._queues.get(name):
            return real(*args, **kwargs)  # it returned no tensors when it was called to encode
        record = self._queues[name].pop(0)
        if record["drew"] is not None:
            self.restore(record["drew"])
        return self._unpacked(record["result"])

    def restore(self, node: Node) -> None:
        """Sets the generators to states that the packet holds."""
        for generator, state in zip(self._generators, self._unpacked(node), strict=True):
            generator.set_state(state)

    def generator_states(self) -> list[torch.Tensor]:
        """The generators' states now."""
        return [generator.get_state() for generator in self._generators]

    def packed(self, packer: Packer) -> list[Node]:
        """The structure of what was recorded; the first latent is packed by its own name."""
        for name, result, _ in self._records:
            if name == _NOISE_RECORD:
                packer.pack(tensors_in(result)[0], LATENTS)
        records, calls = [], Counter[str]()
        for place, (name, result, drew) in enumerate(self._records):
            sent = name not in self._row.unsent or self._row.sent_calls.get(name) == calls[name]
            calls[name] += 1
            node = packer.pack(result, f"record.{place}") if sent else describe(result)
            states = None if drew is None else packer.pack(drew, f"drew.{place}")
            records.append({"name": name, "result": node, "drew": states})
        return records

    def passed_on(self, received: Tensors, tensors: Tensors) -> list[Node]:
        """The records that were received; what is still used of the noise is in the latent."""
        assert self._given is not None
        records: list[Node] = copy.deepcopy(self._given["records"])
        for record in records:
            record["drew"] = None  # each step's state is in the packet
            for leaf in leaves(record["result"]):
                name = leaf["name"]
                if name == LATENTS:
                    leaf["name"] = _NOISE[self._row.noise_use]
                elif record["name"] in self._row.only_first_step:
                    leaf["name"] = None
                if leaf["name"] not in (None, LATENTS):
                    tensors[leaf["name"]] = received[name]
        return records
