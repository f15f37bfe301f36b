"""The exchange of one rank of a pair, with a transport that notes what it is asked for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from svdpp.comm.packet import Packet
from svdpp.errors import NotFiniteError
from svdpp.models.base import Tensors
from svdpp.plan.actions import Action
from svdpp.worker.pair import NotWantedError, Pair

THEIRS = {"prediction": torch.ones(1)}


class _Links:
    """The other rank sends its prediction of each step, and a tombstone at step `dropped`."""

    def __init__(self, dropped: int | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.pressures: list[bool] = []
        self.memory_pressure = False
        self._dropped = dropped

    def post_receive(self, clip: int, step: int, *_: Any) -> _Links:
        self.calls.append(("receive", step))
        is_lost = step == self._dropped
        self._packet = Packet(clip, step, 0.0, {} if is_lost else THEIRS, is_lost)
        self._packet.memory_pressure = self.memory_pressure
        return self

    def wait(self) -> Packet:
        return self._packet

    def send(self, packet: Packet, *_: Any) -> None:
        self.pressures.append(packet.memory_pressure)
        self.calls.append(("tombstone" if packet.tombstone else "send", packet.next_step))


def _pair(links: Any, clip: Packet | None = None) -> Pair:
    return Pair(
        links,
        0,
        Action.parse("DENOISE c0 2:4 =1"),
        clip or Packet(0, 2, 0.0, {}),
        waiting=lambda _: nullcontext(),
        sent=lambda _, tensors: tensors,
        received=lambda *_: None,
    )


def _predict() -> Tensors:
    return {"prediction": torch.zeros(1)}


def test_both_messages_of_each_step_pass() -> None:
    links = _Links()
    pair = _pair(links)
    assert [pair.exchange(step, _predict) for step in (2, 3)] == [THEIRS, THEIRS]
    pair.drop()  # too late: the other rank expects no more
    assert links.calls == [("receive", 2), ("send", 2), ("receive", 3), ("send", 3)]


def test_a_clip_is_dropped_between_two_steps() -> None:
    links = _Links()
    pair = _pair(links)
    pair.exchange(2, _predict)
    pair.drop()
    assert links.calls[2:] == [("receive", 3), ("tombstone", 3)]


def test_the_other_rank_has_dropped_the_clip() -> None:
    links = _Links(dropped=2)
    pair = _pair(links)
    with pytest.raises(NotWantedError):
        pair.exchange(2, _predict)
    pair.drop()
    assert links.calls == [("receive", 2), ("send", 2)]


def test_an_evaluation_that_fails_takes_one_message_of_the_other_rank() -> None:
    def fail() -> Tensors:
        raise NotFiniteError("no prediction")

    links = _Links()
    pair = _pair(links)
    with pytest.raises(NotFiniteError):
        pair.exchange(2, fail)
    pair.drop()
    assert links.calls == [("receive", 2), ("tombstone", 2)]


def test_the_memory_pressure_of_one_rank_is_known_to_both() -> None:
    """The second rank's packet is dropped after the last step, and with it what it says."""
    links, clip = _Links(), Packet(0, 2, 0.0, {})
    pair = _pair(links, clip)
    links.memory_pressure = True
    pair.exchange(2, _predict)
    assert clip.memory_pressure
    pair.exchange(3, _predict)
    assert links.pressures == [False, True]
