"""A device without free memory ends the run by its name; one that is nearly full marks the clip."""

from __future__ import annotations

import pytest

from svdpp.driver.pipeline import Pipeline
from svdpp.errors import OutOfMemoryError
from tests.gpu.inside_ranks import Fragmented, FullDevice
from tests.gpu.machine import Machine

pytestmark = [pytest.mark.processes, pytest.mark.no_rehearsal, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("place", "caching", "words"),
    [
        pytest.param("load", True, "image_encoder needs .* more than is free", id="load"),
        pytest.param("step1", True, "while a denoising step", id="step"),
        pytest.param("decode", False, "while decoding the frames", id="outside torch's allocator"),
    ],
)
def test_out_of_memory_is_named_with_its_part(
    machine: Machine, place: str, caching: bool, words: str
) -> None:
    full = FullDevice("hang", 0, 0, place=place, caching=caching)
    with (
        pytest.raises(OutOfMemoryError, match=words),
        Pipeline(machine.config(1), fault=full) as pipeline,
    ):
        pipeline.run(machine.requests(1))


def test_a_clip_made_under_memory_pressure_says_so(machine: Machine) -> None:
    pressed = Fragmented("hang", 0, 0, place="step1")
    with Pipeline(machine.config(1), fault=pressed) as pipeline:
        first, second = pipeline.run(machine.requests(2))
    assert first.metadata["memory_pressure"] is True
    assert "memory_pressure" not in second.metadata
