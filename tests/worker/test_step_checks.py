"""Each step's latent is checked, in order, and the first that is not finite is named."""

from __future__ import annotations

import pytest
import torch

from svdpp.errors import NotFiniteError
from svdpp.worker.steps import StepChecks

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
