"""The default number of ranks of a command, and the start steps of a draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from svdpp.cli.options.draft import DraftOptions
from svdpp.cli.options.layout import LayoutOptions
from svdpp.cli.plan_choice import PlanChoice
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import RequestError
from svdpp.launch.world import World
from svdpp.plan.draft_starts import DraftProfile, MeasuredStartSteps
from tests.cli.shell import assert_error, svdpp_here


def _choice(
    *,
    steps: int = 25,
    device: str = "cuda",
    world: int | None = None,
    start_steps: str | None = None,
    draft: bool = True,
    launched: World | None = None,
) -> PlanChoice:
    return PlanChoice(
        launched=launched,
        draft=DraftOptions(draft=draft, draft_starts=start_steps),
        layout=LayoutOptions(),
        experts=None,
        world=world,
        on_cpu=2,
        steps=steps,
        family="svd",
        device=device,
    )


def _settings(choice: PlanChoice) -> dict[str, Any]:
    return choice.settings(num_clips=1, decodes=True)[0]


@pytest.mark.parametrize(("gpus", "world_size"), [(2, 2), (4, 4), (12, 8)])
def test_a_draft_takes_all_gpus_whatever_divides(
    monkeypatch: pytest.MonkeyPatch, gpus: int, world_size: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    shape = _settings(_choice())
    assert shape["world_size"] == len(shape["draft"].start_steps) == world_size
    assert _choice(draft=False).world_size() == (1 if gpus < 5 else 5)


def test_a_draft_on_the_cpu_takes_two_ranks() -> None:
    shape = _settings(_choice(device="cpu"))
    assert (shape["world_size"], shape["draft"].start_steps) == (2, (0, 13))


@pytest.mark.parametrize(
    ("device", "gpus", "steps", "world_size"),
    [("cuda", 3, 6, 3), ("cuda", 8, 28, 7), ("cuda", 1, 6, 1), ("cpu", 3, 8, 4), ("cpu", 3, 6, 3)],
)
def test_simulate_starts_as_many_ranks_as_there_are_gpus(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, steps: int, world_size: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    started: list[int] = []

    def start(self: Pipeline) -> None:
        started.append(self.config.world_size)
        raise RequestError("this test starts no ranks")

    monkeypatch.setattr(Pipeline, "__enter__", start)
    answer = svdpp_here("simulate", "--device", device, "--steps", str(steps))
    assert_error(answer, 2, "this test starts no ranks")
    assert started == [world_size]


@pytest.fixture
def measured(tmp_path: Path) -> str:
    """A draft profile for 2 and 4 ranks, with a name that does not tell its content."""
    choices = tuple(
        MeasuredStartSteps(start_steps=start_steps, rounds=13, psnr_db=50.0, max_levels=3)
        for start_steps in ((0, 13), (0, 7, 11, 15))
    )
    profile = DraftProfile(
        model="demo", num_steps=25, photographs=("a.jpg",), source="a test", choices=choices
    )
    path = tmp_path / "wave"
    path.write_text(json.dumps(profile.to_json()))
    return str(path)


def _world(size: int) -> World:
    return World(rank=0, local_rank=0, size=size, local_size=size, launcher="torchrun")


def test_a_file_of_starts_is_asked_for_the_ranks_there_are(measured: str) -> None:
    assert _settings(_choice(start_steps=measured))["draft"].start_steps == (0, 7, 11, 15)
    assert _settings(_choice(start_steps=measured, world=2))["draft"].start_steps == (0, 13)
    joined = _choice(start_steps=measured, launched=_world(2))
    assert _settings(joined)["draft"].start_steps == (0, 13)


def test_starts_for_other_ranks_than_the_launchers() -> None:
    with pytest.raises(RequestError, match="--draft-starts names 2 ranks, torchrun has 4"):
        _settings(_choice(start_steps="0,14", launched=_world(4)))
