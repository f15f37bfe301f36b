"""Verification of every family: real ranks give the bits of diffusers' own pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ModelConfig
from tests.support.clip_inputs import Inputs, verify_case
from tests.support.tiny_families import CASES, save_tiny

#: Name of the first case of each family from text, and of the first one from an image or a video.
_NAMES = {(case.family, case.image): name for name, case in reversed(CASES.items())}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", _NAMES.values())
def test_ranks_give_the_bits_of_diffusers(
    inputs: Inputs, tmp_path: Path, name: str, world_size: int, dtype: Any
) -> None:
    case = CASES[name]
    folder = save_tiny(case.family, tmp_path / "model", image=case.image, **case.changes)
    model = ModelConfig(name=str(folder), family=case.family, dtype=dtype)
    result = verify_case(case, model, inputs, world_size=world_size)
    assert result.bitwise, result
    assert {check.rank for check in result.checks} == set(range(world_size))
