"""A rank lives until every rank has what was sent to it."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.launch.group import RankContext
from svdpp.launch.world import World
from svdpp.worker import rank
from svdpp.worker.messages import Cancel, Failed, Finished, Stop, parse_event

COMMANDS = (Stop(), Cancel(clip=0), Stop())


class Parent:
    """The parent's side of a channel: its commands, of which all but the first come at the end."""

    def __init__(self) -> None:
        self.commands = deque(command.to_bytes() for command in COMMANDS)
        self.said: list[object] = []

    def send(self, message: bytes) -> None:
        self.said.append(parse_event(message))

    def receive(self, timeout: float) -> bytes | None:  # noqa: ARG002
        is_finished = any(isinstance(event, Finished) for event in self.said)
        if len(self.commands) < len(COMMANDS) and not is_finished:
            return None
        return self.commands.popleft()


def test_a_rank_that_is_finished_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "take_device", lambda *_: torch.device("cpu"))
    config = PipelineConfig(
        world_size=1,
        model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8)),
        sampling=SvdSampling(num_inference_steps=1),
    )
    parent = Parent()
    left: list[int] = []
    world = World(rank=0, local_rank=0, size=1, local_size=1)
    context = RankContext(
        world,
        "gloo",
        parent,
        join=lambda: None,
        leave=lambda: left.append(len(parent.commands)),
    )
    rank.rank_main(context, rank.RankSetup(config=config, checkpoint=None))
    assert left == [0]
    assert not any(isinstance(event, Failed) for event in parent.said)
