"""Negative controls of every row: damage to any part of a packet shows in the clip.

A part whose damage shows nowhere need not travel, so these tests also find what a row should drop.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from svdpp.models.base import GENERATOR, LATENTS, STRUCTURE, Tensors
from tests.models.range_checks import Row, nothing
from tests.models.test_rows import CASES, Rows

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = 'the sea, and a sign: "a cat"'  # HunyuanVideo-1.5 encodes the quoted text by itself
#: Without cases that differ from another one in weights or guidance alone.
NAMES = [
    name
    for name in CASES
    if not any(word in name for word in ("16", "5b", "euler", "order", "timestep", "unguided"))
]
QUICK = {"wan", "ltx-image", "ltx-condition-image", "latte"}
#: Their schedulers keep nothing from step to step.
STATELESS = ("cogvideox", "latte")
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


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in NAMES],
)
def test_every_tensor_and_number_of_a_packet_is_needed(rows: Rows, name: str) -> None:
    """The generator is needed where later steps draw."""
    row = rows(name)
    clip = row.request(PROMPT, negative_prompt=PROMPT)
    packet = row.rank_for(0, 1).denoise(row.encode(clip), 0, 1, nothing)
    whole = _last(row, packet)
    frames = row.decoder.decode(whole)

    def shows(damaged: Tensors) -> bool:
        """Whether the rest of the clip, or an error, tells the damaged packet from the whole."""
        try:
            last = _last(row, damaged)
            if not torch.equal(last[LATENTS], whole[LATENTS]):
                return True
            return not torch.equal(row.decoder.decode(last), frames)
        except Exception:
            return True

    assert not shows(dict(packet))
    states = _structure(packet)["step"]["states"]
    assert any(state["items"] for state in states) != name.startswith(STATELESS)
    tensors = [each for each in packet if not each.startswith((STRUCTURE, GENERATOR))]
    damaged = [*((each, _damaged(packet, each)) for each in tensors), *_other_states(packet)]
    unseen = [
        part
        for part, other in damaged
        if f"{name} {part}" not in UNREAD
        and not any(known in part for known in UNREAD)
        and not shows(other)
    ]
    assert unseen == []
    generator = torch.Generator().manual_seed(9).get_state()
    assert shows({**packet, f"{GENERATOR}.0": generator}) == (name in DRAWING)


def _last(row: Row, packet: Tensors) -> Tensors:
    return row.rank_for(1, row.steps).denoise(packet, 1, row.steps, nothing)


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
            # Only the first step reads `_begin_index`.
            if isinstance(value, int) and key != "_begin_index":
                structure = _structure(packet)
                structure["step"]["states"][index]["items"][key]["value"] = value - 1
                data = bytearray(json.dumps(structure).encode())
                yield key, {**packet, STRUCTURE: torch.frombuffer(data, dtype=torch.uint8)}


def _structure(packet: Tensors) -> Any:
    return json.loads(packet[STRUCTURE].numpy().tobytes())
