"""The steps of one DENOISE: each latent is checked, and ranks of a pair exchange predictions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from svdpp.comm.packet import Packet
from svdpp.errors import NotFiniteError
from svdpp.models.base import Tensors
from svdpp.plan.actions import Action
from svdpp.worker.steps import Denoising, NotWantedError, RankTools, StepChecks

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


def _pair(links: Any, clip: Packet | None = None) -> Denoising:
    tools = RankTools(rank=0, device=torch.device("cpu"), transport=links, reporter=Mock())
    return Denoising(tools, Action.parse("DENOISE c0 2:4 =1"), clip or Packet(0, 2, 0.0, {}))


def _predict() -> Tensors:
    return {"prediction": torch.zeros(1)}


def _fail() -> Tensors:
    raise NotFiniteError("no prediction")


@pytest.mark.parametrize(
    ("dropped", "evaluations", "error", "calls"),
    [
        # A drop after the last step is too late: the other rank expects no more.
        (None, [_predict, _predict], None, "receive 2, send 2, receive 3, send 3"),
        (None, [_predict], None, "receive 2, send 2, receive 3, tombstone 3"),
        (2, [_predict], NotWantedError, "receive 2, send 2"),
        # An evaluation that fails takes one message of the other rank.
        (None, [_fail], NotFiniteError, "receive 2, tombstone 2"),
    ],
)
def test_both_ranks_send_one_message_for_each_step_until_one_drops_the_clip(
    dropped: int | None,
    evaluations: list[Callable[[], Tensors]],
    error: type[Exception] | None,
    calls: str,
) -> None:
    links = _Links(dropped)
    pair = _pair(links)
    for step, evaluate in enumerate(evaluations, 2):
        with pytest.raises(error) if error else nullcontext():
            assert pair.exchange(step, evaluate) == THEIRS
    pair.drop()
    assert ", ".join(f"{kind} {step}" for kind, step in links.calls) == calls


def test_the_memory_pressure_of_one_rank_is_known_to_both() -> None:
    """The second rank's packet is dropped after the last step, and with it what it says."""
    links, clip = _Links(), Packet(0, 2, 0.0, {})
    pair = _pair(links, clip)
    links.memory_pressure = True
    pair.exchange(2, _predict)
    assert clip.memory_pressure
    pair.exchange(3, _predict)
    assert links.pressures == [False, True]


CPU = torch.device("cpu")
FINE = torch.zeros(3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_first_bad_step_is_named(bad: float) -> None:
    done: list[tuple[int, float]] = []
    checks = StepChecks(CPU, 2, lambda step, seconds: done.append((step, seconds)))
    checks.add(4, FINE)
    checks.add(5, FINE)
    with pytest.raises(NotFiniteError, match="not finite after step 6, done by rank 2"):
        checks.add(6, torch.tensor([0.0, bad, 0.0]))
    assert [step for step, _ in done] == [4, 5]
    assert all(seconds >= 0 for _, seconds in done)


def test_all_steps_are_reported_when_it_finishes() -> None:
    done: list[int] = []
    checks = StepChecks(CPU, 0, lambda step, _: done.append(step))
    for step in range(3):
        checks.add(step, FINE)
    checks.finish()
    assert done == [0, 1, 2]
