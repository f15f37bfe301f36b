"""The noise levels of a plan equal those of diffusers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import svdpp
from svdpp.plan import sigmas
from svdpp.plan.sigmas import karras_sigmas

CONFIG = Path(svdpp.__file__).parent / "assets/demo-model/scheduler/scheduler_config.json"


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("num_steps", [1, 2, 3, 14, 25, 28, 50, 100])
def test_sigmas_are_those_of_diffusers(num_steps: int) -> None:
    from diffusers import EulerDiscreteScheduler

    scheduler = EulerDiscreteScheduler.from_config(json.loads(CONFIG.read_text()))
    scheduler.set_timesteps(num_steps)

    assert len(karras_sigmas(num_steps)) == num_steps + 1
    # diffusers computes them in float32: relative error 2**-24, increased by a power of 7.
    assert karras_sigmas(num_steps) == pytest.approx(scheduler.sigmas.tolist(), rel=1e-5)


@pytest.mark.parametrize("num_steps", [2, 28, 1000])
def test_sigmas_fall_from_the_largest_to_nothing(num_steps: int) -> None:
    levels = karras_sigmas(num_steps)

    assert levels == sorted(set(levels), reverse=True)
    assert levels[0] == pytest.approx(700)
    assert levels[-2:] == [pytest.approx(0.002), 0]


def test_range_is_that_of_the_scheduler_config() -> None:
    config = json.loads(CONFIG.read_text())

    assert (config["sigma_min"], config["sigma_max"]) == (sigmas.SIGMA_MIN, sigmas.SIGMA_MAX)
    assert config["use_karras_sigmas"] is True
