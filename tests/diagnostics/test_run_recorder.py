"""What a run leaves for its report, from events alone: no rank is started."""

from __future__ import annotations

import json

import pytest

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling
from svdpp.diagnostics import run_recorder
from svdpp.diagnostics.run_recorder import FigureRecorder, of_run
from svdpp.driver.pipeline import Pipeline
from svdpp.worker.messages import ActionDone, ClipDone, StepDone


def _config() -> PipelineConfig:
    return PipelineConfig(
        world_size=1,
        model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8)),
        sampling=SvdSampling(num_inference_steps=2, num_frames=2),
    )


def _recorder(num_clips: int) -> FigureRecorder:
    requests = [ClipRequest(seed=seed) for seed in range(num_clips)]
    return FigureRecorder(_config(), of_run(Pipeline(_config()), requests))


def _make_clip(recorder: FigureRecorder, clip: int, *, wait: float = 0.0) -> None:
    """Events of a clip: it begins at its index, waits, and computes for half a second."""
    for step in range(2):
        recorder(0, StepDone(clip=clip, step=step, seconds=0.25))
    done = ActionDone(
        action=f"DENOISE c{clip} 0:2",
        start=clip + wait,
        end=clip + wait + 0.5,
        waited=wait,
        waits={"photograph": wait},
    )
    recorder(0, done)
    recorder(0, ClipDone(clip=clip, metadata={}, write_seconds=0.1 * (clip + 1)))


def test_figures_are_sums_of_the_events() -> None:
    recorder = _recorder(3)
    for clip in range(3):
        _make_clip(recorder, clip, wait=0.2)
    figures = recorder.figures()
    assert figures is not None
    (rank,) = figures.ranks
    assert (figures.clips, rank.step.count, rank.step.mean_seconds) == (3, 6, 0.25)
    assert rank.compute == pytest.approx(1.5)
    assert rank.photograph_wait == pytest.approx(0.6)
    assert (rank.write.count, rank.write.mean_seconds) == (3, pytest.approx(0.2))
    assert figures.forecast_seconds == pytest.approx(1.5)


def test_a_long_run_leaves_the_figures_of_its_last_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_recorder, "_KEPT_CLIPS", 5)
    recorder = _recorder(20)
    for clip in range(20):
        _make_clip(recorder, clip, wait=0.2)
    figures = recorder.figures()
    assert figures is not None
    assert (figures.clips, figures.ranks[0].step.count) == (5, 10)
    # Waits are of the same clips.
    assert figures.ranks[0].photograph_wait == pytest.approx(1.0)
    assert figures.forecast_seconds == pytest.approx(2.5)
    assert len(json.dumps(figures.to_json())) < 10_000


def test_a_run_that_fails_has_figures_if_it_made_a_step() -> None:
    recorder = _recorder(3)
    assert recorder.figures() is None
    _make_clip(recorder, 0)
    figures = recorder.figures()
    assert figures is not None
    assert (figures.clips, figures.forecast_seconds) == (1, None)  # not all clips were made
