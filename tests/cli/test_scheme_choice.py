"""How many ranks a command takes, and what becomes of a draft's starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from svdpp.cli.draft_choice import DraftChoice
from svdpp.cli.layout_choice import LayoutChoice
from svdpp.cli.scheme_choice import SchemeChoice


def _choice(
    *,
    steps: int = 25,
    device: str = "cuda",
    world: int | None = None,
    starts: str | None = None,
    draft: bool = True,
) -> SchemeChoice:
    return SchemeChoice(
        draft=DraftChoice(draft=draft, starts=starts),
        layout=LayoutChoice(),
        world=world,
        steps=steps,
        device=device,
    )


def _settings(choice: SchemeChoice) -> dict[str, Any]:
    return choice.settings(num_clips=1, decodes=True)[0]


@pytest.mark.parametrize(("gpus", "world_size"), [(2, 2), (4, 4), (12, 8)])
def test_a_draft_takes_all_gpus_whatever_divides(
    monkeypatch: pytest.MonkeyPatch, gpus: int, world_size: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    shape = _settings(_choice())
    assert shape["world_size"] == len(shape["draft"].starts) == world_size
    assert _choice(draft=False).world_size() == (1 if gpus < 5 else 5)


def test_a_draft_on_the_cpu_takes_two_ranks() -> None:
    shape = _settings(_choice(device="cpu"))
    assert (shape["world_size"], shape["draft"].starts) == (2, (0, 13))
