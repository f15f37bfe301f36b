"""Verification of every family: real ranks give the bits of diffusers' own pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svdpp.config import ClipRequest, ModelConfig, OutputConfig, ParallelConfig, PipelineConfig
from svdpp.config.families.registry import FAMILY_SPECS
from svdpp.media.video import write_clip
from svdpp.verification.verify import verify
from tests.support.family_case import Case
from tests.support.range_checks import PROMPT, photograph
from tests.support.tiny_families import CASES, save_tiny

#: Name of the first case of each family, from text and from an image or a video.
_NAMES = {(case.family, case.image): name for name, case in reversed(CASES.items())}
#: Frames of the input videos: more than any case reads.
_NUM_FRAMES = 120


@dataclass(frozen=True)
class Inputs:
    """Paths of input files."""

    images: tuple[str, ...]
    videos: tuple[str, ...]

    def of(self, case: Case) -> dict[str, Any]:
        """Return the inputs of a case's clip as fields of `ClipRequest`."""
        if not case.image:
            return {}
        sampling: Any = case.config()
        first, *others = self.images
        further: Mapping[str, str] = dict(zip(sampling.videos, self.videos, strict=False))
        return {
            "image": self.videos[0] if sampling.from_video else first,
            "last_image": others[0] if case.last_image else None,
            "references": tuple(others[: case.num_references]),
            "videos": further,
        }


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Images, and videos of noise."""
    folder = tmp_path_factory.mktemp("inputs")
    images = [folder / f"{seed}.png" for seed in range(4)]
    videos = [folder / f"{seed}.mp4" for seed in range(4)]
    for seed, (image, video) in enumerate(zip(images, videos, strict=True)):
        photograph(seed).save(image)
        pixels = np.random.default_rng(seed).integers(0, 256, (_NUM_FRAMES, 48, 64, 3), np.uint8)
        write_clip(pixels, OutputConfig(path=str(video)), fps=16, metadata={})
    return Inputs(tuple(map(str, images)), tuple(map(str, videos)))


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
    prompts = {"prompt": PROMPT, "negative_prompt": case.negative}
    if not FAMILY_SPECS[case.family].takes_prompt:
        prompts = {}
    config = PipelineConfig(
        world_size=world_size,
        model=ModelConfig(name=str(folder), family=case.family, dtype=dtype),
        sampling=case.config(),
        parallel=ParallelConfig(split="balanced"),
    )
    requests = [ClipRequest(seed=seed, **inputs.of(case), **prompts) for seed in (1, 2)]
    result = verify(config, requests)
    assert result.bitwise, result
    assert {check.rank for check in result.checks} == set(range(world_size))
