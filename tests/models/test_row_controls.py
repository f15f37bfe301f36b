"""Negative controls of every row: damage to any part of a packet shows in the clip.

A part whose damage shows nowhere need not travel, so these tests also find what a row should drop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from svdpp.models.base import GENERATOR, LATENTS, STRUCTURE, Tensors
from svdpp.models.engine.model import EngineModel
from tests.models.range_checks import nothing, ranks, request_of, source
from tests.models.test_rows import CASES, checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")

__all__ = ["checkpoints"]

PROMPT = 'the sea, and a sign: "a cat"'  # HunyuanVideo-1.5 encodes the quoted text by itself
#: Without cases that differ from another one in weights or guidance alone.
ROWS = {
    name: case
    for name, case in CASES.items()
    if not any(word in name for word in ("16", "5b", "euler", "order", "timestep", "unguided"))
}
#: Their schedulers keep nothing from step to step.
STATELESS = {name for name in ROWS if name.startswith(("cogvideox", "latte"))}
#: They draw noise while they step; the others draw all of it before.
DRAWING = {"cogvideox-dpm", "ltx-condition-image", "framepack-chunks"}
#: Parts of a packet that nothing reads, and why they travel.
UNREAD: dict[str, str] = {
    "timestep_list": "UniPC keeps timesteps of which only another solver reads more than one",
    "cogvideox result.0.0.1": "of this family's other scheduler, step reads it",
    "cogvideox-image result.0.0.1": "of this family's other scheduler, step reads it",
    "cogvideox-video result.0.0.1": "of this family's other scheduler, step reads it",
    "ltx-condition noise": "a clip from an image reads it",
    "ltx-condition _step_index": "each position's noise level is found by its timestep",
    "ltx-condition-image _step_index": "each position's noise level is found by its timestep",
    "skyreels-v2-df record.2.1": "a table of a few numbers",
}


@dataclass(frozen=True)
class Half:
    """A packet after the first step, and the ranks that go on."""

    name: str
    rank_for: Callable[[int, int], EngineModel]
    steps: int
    packet: Tensors

    def shows(self, damaged: Tensors) -> bool:
        """Whether the rest of the clip, or an error, tells the damaged packet from the whole."""
        try:
            latents, expected = self._last(damaged), self._last(self.packet)
            if not torch.equal(latents[LATENTS], expected[LATENTS]):
                return True
            return not torch.equal(self._frames(latents), self._frames(expected))
        except Exception:
            return True

    def unseen(self, damaged: Iterator[tuple[str, Tensors]]) -> list[str]:
        """The parts whose damage shows nowhere, but for the known ones."""
        return [
            part
            for part, packet in damaged
            if f"{self.name} {part}" not in UNREAD
            and not any(known in part for known in UNREAD)
            and not self.shows(packet)
        ]

    def _last(self, packet: Tensors) -> Tensors:
        return self.rank_for(1, self.steps).denoise(packet, 1, self.steps, nothing)

    def _frames(self, packet: Tensors) -> torch.Tensor:
        return self.rank_for(self.steps, self.steps).decode(packet)


def marked(names: Iterable[str]) -> list[Any]:
    """All but a few are long."""
    quick = ("wan", "ltx-image", "ltx-condition-image", "framepack-chunks", "latte")
    return [each if each in quick else pytest.param(each, marks=pytest.mark.long) for each in names]


@pytest.fixture
def half(request: pytest.FixtureRequest, checkpoints: Callable[[str], Any]) -> Half:
    """Of the row that the test names."""
    name: str = request.param
    case, checkpoint = ROWS[name], checkpoints(name)
    steps = 6 if name == "framepack-chunks" else 3
    sampling = checkpoint.resolve(case.config(num_inference_steps=steps))
    rank_for = ranks(checkpoint, sampling)
    encoder = rank_for(0, 0)
    prepared = encoder.prepare(source(sampling)) if case.image else {}
    prompt = PROMPT if checkpoint.row.takes_prompt else None
    clip = request_of(prompt, negative_prompt=prompt)
    packet = rank_for(0, 1).denoise(encoder.encode(prepared, clip), 0, 1, nothing)
    half = Half(name, rank_for, steps, packet)
    assert not half.shows(dict(packet))
    return half


@pytest.mark.parametrize("half", marked(ROWS), indirect=True)
def test_every_tensor_of_a_packet_is_needed(half: Half) -> None:
    names = [name for name in half.packet if not name.startswith((STRUCTURE, GENERATOR))]
    assert half.unseen((name, _damaged(half.packet, name)) for name in names) == []


@pytest.mark.parametrize("half", marked(sorted({*ROWS} - STATELESS)), indirect=True)
def test_every_number_of_the_state_is_needed(half: Half) -> None:
    assert half.unseen(_other_states(half.packet)) == []


@pytest.mark.parametrize("half", sorted(STATELESS), indirect=True)
def test_other_schedulers_have_no_state(half: Half) -> None:
    states = _structure(half.packet)["step"]["states"]
    assert all(not state["items"] for state in states)


@pytest.mark.parametrize("half", marked(ROWS), indirect=True)
def test_the_generator_is_needed_where_later_steps_draw(half: Half) -> None:
    other = torch.Generator().manual_seed(9).get_state()
    assert half.shows({**half.packet, f"{GENERATOR}.0": other}) == (half.name in DRAWING)


def _damaged(packet: Tensors, name: str) -> Tensors:
    tensor = packet[name]
    if tensor.is_floating_point():
        return {**packet, name: torch.full_like(tensor, torch.nan)}
    return {**packet, name: (tensor == 0).to(tensor.dtype)}


def _other_states(packet: Tensors) -> Iterator[tuple[str, Tensors]]:
    """For each number in the state of the schedulers, the packet with another one."""
    for index, state in enumerate(_structure(packet)["step"]["states"]):
        for key, node in state["items"].items():
            value = node.get("value")
            if (
                not isinstance(value, int) or key == "_begin_index"
            ):  # which only the first step reads
                continue
            structure = _structure(packet)
            structure["step"]["states"][index]["items"][key]["value"] = value - 1
            data = bytearray(json.dumps(structure).encode())
            yield key, {**packet, STRUCTURE: torch.frombuffer(data, dtype=torch.uint8)}


def _structure(packet: Tensors) -> Any:
    return json.loads(packet[STRUCTURE].numpy().tobytes())
