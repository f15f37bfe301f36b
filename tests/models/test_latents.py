"""Tensors that a receiver expects of each family, compared with those that ranks make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch

from svdpp.models.base import LATENTS, STRUCTURE
from tests.support.family_case import Case, size
from tests.support.range_checks import TinyModel, check_expected_tensors, nothing
from tests.support.tiny_families import CASES, chosen

pytestmark = pytest.mark.usefixtures("one_thread")

EULER: dict[str, Any] = {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)}
#: Cases with Euler's scheduler, for families whose other cases have another scheduler.
STEPPED = {
    "wan-image-euler": Case("wan", size(32, 32, 5), image=True, changes=EULER),
    "wan-vace-image-euler": Case("wan_vace", size(32, 32, 9), image=True, changes=EULER),
    "skyreels-v2-euler": Case("skyreels_v2", size(16, 16, 9), changes=EULER),
}
IN_MAKE_TEST = ("svd", "wan", "hunyuan-video", "wan-euler-bf16")


@pytest.mark.parametrize("name", chosen(IN_MAKE_TEST))
def test_each_step_gives_the_expected_tensors(
    tiny_models: Callable[[str], TinyModel], name: str
) -> None:
    _check(tiny_models(name), CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPPED)
def test_each_step_gives_the_expected_tensors_with_another_scheduler(
    tiny_model_of: Callable[[Case], TinyModel], name: str
) -> None:
    _check(tiny_model_of(STEPPED[name]), STEPPED[name])


def _check(tiny_model: TinyModel, case: Case) -> None:
    tiny_model = replace(
        tiny_model, model=replace(tiny_model.model, dtype="bf16")
    )  # so that tensors in float32 have another dtype than the model
    packet = tiny_model.encode(tiny_model.request(negative_prompt=case.negative))
    for step in range(tiny_model.steps + 1):
        check_expected_tensors(tiny_model.rank_for, tiny_model.steps, step, packet)
        if step < tiny_model.steps:
            packet = tiny_model.rank_for(step, step + 1).denoise(packet, step, step + 1, nothing)


def test_a_structure_that_cannot_be_read_is_no_crash(
    tiny_models: Callable[[str], TinyModel],
) -> None:
    model = tiny_models("svd").decoder
    with pytest.raises(ValueError, match="cannot be read"):
        model.tensor_specs({STRUCTURE: torch.zeros(3, dtype=torch.uint8)})
    assert STRUCTURE in model.tensor_specs({LATENTS: torch.zeros(1)})
