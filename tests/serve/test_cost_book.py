"""The costs of a clip are those of its size, measured if possible."""

from __future__ import annotations

from dataclasses import replace

import pytest

from svdpp.config import SvdSampling
from svdpp.plan.costs import PRESETS, Costs
from svdpp.serve.eta import MeasuredCosts
from svdpp.worker.messages import ActionDone, StepDone, TransferDone

SAMPLING = SvdSampling(num_frames=25)
HALF = replace(SAMPLING, width=512)


def _step(seconds: float) -> StepDone:
    return StepDone(clip=0, step=1, seconds=seconds)


def test_before_a_measurement_the_preset_is_scaled_by_size() -> None:
    book = MeasuredCosts(None, HALF)
    preset = PRESETS["svd-xt-a100"]
    assert book.costs(SAMPLING) == preset
    assert book.costs(HALF).step_on(0) == pytest.approx(preset.step_on(0) / 2)


def test_what_is_not_measured_is_scaled_by_the_time_of_a_step() -> None:
    book = MeasuredCosts(Costs(step_seconds=2.0, decode_seconds=6.0), SAMPLING)
    book.add(0, _step(9.0), SAMPLING)
    assert book.costs(SAMPLING).step_on(0) == 9.0, "the only one, though the rank warms up"
    book.add(0, _step(1.0), SAMPLING)
    book.add(1, _step(9.0), SAMPLING)
    costs = book.costs(SAMPLING)
    assert (costs.step_on(0), costs.decode_on(0)) == (1.0, 3.0)
    for event in (
        ActionDone(action="DECODE c0 @28", start=1.0, end=5.0, waited=0.0),
        TransferDone(
            direction="recv", clip=0, next_step=7, peer=0, num_bytes=1, seconds=0.5, end=1.0
        ),
    ):
        book.add(1, event, SAMPLING)
    costs = book.costs(SAMPLING)
    assert (costs.decode_on(0), costs.transfer(0, 1)) == (4.0, 0.5)
    assert book.costs(HALF) == replace(costs, step_seconds=0.5, decode_seconds=2.0)


def test_a_clip_that_waits_for_its_image_takes_that_long_to_encode() -> None:
    book = MeasuredCosts(None, SAMPLING)
    waits = {"photograph": 3.0, "send": 9.0}
    encode = ActionDone(action="ENCODE c0 @0", start=1.0, end=2.0, waited=12.0, waits=waits)
    for event in (_step(1.0), encode):
        book.add(0, event, SAMPLING)
    assert book.costs(SAMPLING).encode_on(0) == 4.0


def test_each_size_has_its_own_and_the_newest_counts_for_others() -> None:
    book = MeasuredCosts(None, SAMPLING)
    for width in range(64, 64 + 8 * 50, 8):
        for _ in range(3):
            book.add(0, _step(float(width)), replace(SAMPLING, width=width))
    assert book.costs(replace(SAMPLING, width=448)).step_on(0) == 448
    assert book.costs(replace(SAMPLING, width=64)).step_on(0) == pytest.approx(64)
    assert len(book._samples) == 32


def test_ranks_that_start_again_warm_up_again() -> None:
    book = MeasuredCosts(None, SAMPLING)
    for _ in range(3):
        book.add(0, _step(1.0), SAMPLING)
    book.begin()
    book.add(0, _step(100.0), SAMPLING)
    assert book.costs(SAMPLING).step_on(0) == 1.0
