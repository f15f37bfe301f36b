"""What becomes of outputs that are there already: kept, made anew, refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svdpp.config import ModelConfig, OutputConfig, PipelineConfig, SamplingConfig
from svdpp.errors import RequestError
from svdpp.media import place, video
from svdpp.media.image import Photo, read_photo
from svdpp.models.checkpoint import find_checkpoint
from svdpp.runtime.record import clip_record
from svdpp.runtime.request import ClipPlan, OutputPolicy, check_outputs, plan_clips
from tests.cli.shell import PHOTO

CONFIG = PipelineConfig(
    world_size=2,
    model=ModelConfig(name="demo"),
    sampling=SamplingConfig(num_inference_steps=2, height=32, width=32, num_frames=2),
)
CONFIG = replace(CONFIG, sampling=CONFIG.sampling.resolved(model_frames=14))


@pytest.fixture(scope="module")
def photo() -> Photo:
    return read_photo(Path(PHOTO))[1]


def _finish(photo: Photo, output: OutputConfig, config: PipelineConfig, **more: Any) -> None:
    """Puts a clip in its place, as a run would."""
    record = clip_record(photo, 0, output, config, find_checkpoint(config.model))
    record |= {"latents_sha256": "0" * 64, "frames_sha256": "0" * 64, **more}
    Path(output.path).parent.mkdir(exist_ok=True)
    video.write_clip(np.zeros((2, 32, 32, 3), np.uint8), output, fps=7, metadata=record)
    place.write_json(Path(output.json_path), record)


def _plan(photo: Photo, policy: OutputPolicy, config: PipelineConfig = CONFIG) -> ClipPlan:
    check_outputs([photo], [0], policy)
    return plan_clips([photo], [0], policy, config, find_checkpoint(config.model))


def _other_fps(config: PipelineConfig) -> PipelineConfig:
    return replace(config, sampling=replace(config.sampling, fps=9))


@pytest.mark.parametrize(
    ("before", "is_kept"), [(lambda config: config, True), (_other_fps, False)]
)
def test_a_restart_with_overwrite_keeps_what_is_as_asked_for(
    photo: Photo,
    before: Callable[[PipelineConfig], PipelineConfig],
    is_kept: bool,
    tmp_path: Path,
) -> None:
    policy = OutputPolicy(folder=tmp_path, overwrite=True)
    _finish(photo, OutputConfig(path=str(tmp_path / "rocket_0.mp4")), before(CONFIG))
    assert len(_plan(photo, policy).requests) == 1
    restarted = _plan(photo, replace(policy, is_restarted=True))
    assert [len(restarted.skipped), len(restarted.requests)] == [is_kept, not is_kept]


def test_a_restart_without_overwrite_makes_nothing_anew(photo: Photo, tmp_path: Path) -> None:
    policy = OutputPolicy(folder=tmp_path, is_restarted=True)
    _finish(photo, OutputConfig(path=str(tmp_path / "rocket_0.mp4")), _other_fps(CONFIG))
    with pytest.raises(RequestError, match="exists with another fps"):
        _plan(photo, policy)
    with pytest.raises(RequestError, match="contradict each other"):
        _plan(photo, OutputPolicy(folder=tmp_path, overwrite=True, resume=True))
