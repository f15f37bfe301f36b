"""Input files for the clips of test cases, and verification of a case by real ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from svdpp.config import ClipRequest, ModelConfig, OutputConfig, ParallelConfig, PipelineConfig
from svdpp.config.families.registry import FAMILY_SPECS
from svdpp.media.video import write_clip
from svdpp.verification.result import VerificationResult
from svdpp.verification.verify import verify
from tests.support.family_case import Case
from tests.support.range_checks import PROMPT, photograph

#: Number of frames of each input video, which is more than any test case reads.
_NUM_FRAMES = 120


@dataclass(frozen=True)
class Inputs:
    """Paths of the images and videos that test cases use as inputs of clips."""

    images: tuple[str, ...]
    videos: tuple[str, ...]

    def of(self, case: Case) -> dict[str, Any]:
        """Return the input files of a test case's clip as fields of `ClipRequest`."""
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


def create_inputs(folder: Path) -> Inputs:
    """Write images and videos of noise, as inputs of clips, to a folder."""
    images = [folder / f"{seed}.png" for seed in range(4)]
    videos = [folder / f"{seed}.mp4" for seed in range(4)]
    for seed, (image, video) in enumerate(zip(images, videos, strict=True)):
        photograph(seed).save(image)
        pixels = np.random.default_rng(seed).integers(0, 256, (_NUM_FRAMES, 48, 64, 3), np.uint8)
        write_clip(pixels, OutputConfig(path=str(video)), fps=16, metadata={})
    return Inputs(tuple(map(str, images)), tuple(map(str, videos)))


def verify_case(
    case: Case, model: ModelConfig, inputs: Inputs, *, world_size: int, **options: Any
) -> VerificationResult:
    """Make two clips of a test case on real ranks, and compare them with those of diffusers.

    Args:
        case: Case whose clips are made.
        model: Checkpoint of the case.
        inputs: Images and videos of the clips.
        world_size: Number of ranks.
        options: Further arguments of `verify`.
    """
    prompts = {"prompt": PROMPT, "negative_prompt": case.negative}
    if not FAMILY_SPECS[case.family].takes_prompt:
        prompts = {}
    config = PipelineConfig(
        world_size=world_size,
        model=model,
        sampling=case.config(),
        parallel=ParallelConfig(split="balanced"),
    )
    requests = [ClipRequest(seed=seed, **inputs.of(case), **prompts) for seed in (1, 2)]
    return verify(config, requests, **options)
