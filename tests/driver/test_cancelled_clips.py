"""Cancelled clips: a waiting one ends at once, a running one at the next step; others go on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ClipRequest, OutputConfig, PipelineConfig
from svdpp.driver.clips import ClipProgress
from svdpp.driver.pipeline import Pipeline
from svdpp.media.inputs import example_photos
from svdpp.plan.costs import Costs
from svdpp.worker import tensor_files
from tests.driver.dummies import HANG_SECONDS, clips, config
from tests.faults.damage import Damage
from tests.models.builders import small_svd

pytestmark = pytest.mark.processes


@pytest.fixture
def release(tmp_path: Path) -> Iterator[Path]:
    """The file whose existence lets a held rank go on."""
    path = tmp_path / "release"
    yield path
    path.touch()


def _held(release: Path, rank: int, place: str) -> Damage:
    return Damage("hang", rank, 0, place=place, until=str(release))


def _slow(world_size: int, **changes: Any) -> PipelineConfig:
    """Twelve steps of a tenth of a second, so that ranks learn of a cancellation in between."""
    plain = config(world_size, steps=12, costs=Costs(step_seconds=0.1), **changes)
    return replace(plain, model=replace(plain.model, dummy_sleeps=True))


def test_a_waiting_clip_is_cancelled_at_once(release: Path) -> None:
    with Pipeline(config(3, steps=6), fault=_held(release, 0, "step0")) as pipeline:
        first, second, third = pipeline.submit(clips(0, 1, 2))
        assert second.cancel()
        assert second.cancelled()
        assert second.cancel()  # again changes nothing
        with pytest.raises(CancelledError):
            second.result(0)
        assert not first.done()
        release.touch()
        assert [result.clip for result in pipeline.results()] == [0, 2]
        assert not first.cancel()
        assert first.progress == ClipProgress(6, 6, 2)
        assert not third.cancelled()
        assert pipeline.failures == []
        assert pipeline.run(ClipRequest(seed=3)).clip == 3


def test_a_running_clip_ends_when_all_ranks_have_let_go(release: Path) -> None:
    alone = Pipeline(config(1, steps=12))
    with alone:
        expected = alone.run(ClipRequest(seed=1)).metadata["latents_sha256"]
    with Pipeline(_slow(3), fault=_held(release, 1, "step5")) as pipeline:
        first = pipeline.submit(ClipRequest(seed=0))
        while first.progress != ClipProgress(5, 12, 1):
            assert not first.done()
        assert first.running()
        assert first.cancel()
        assert not first.done()
        second = pipeline.submit(ClipRequest(seed=1))
        release.touch()
        with pytest.raises(CancelledError):
            first.exception(HANG_SECONDS)
        assert first.progress.steps_done < 12
        assert not first.running()
        assert second.result(HANG_SECONDS).metadata["latents_sha256"] == expected
        assert [result.clip for result in pipeline.results()] == []


def test_a_cancelled_clip_leaves_neither_file_nor_latent_checkpoint(
    release: Path, tmp_path: Path
) -> None:
    out, latents = tmp_path / "out", tmp_path / "latents"
    out.mkdir()
    latents.mkdir()
    request = ClipRequest(
        seed=0,
        image=str(example_photos()[0]),
        output=OutputConfig(path=str(out / "clip.mp4")),
        latents_key="a" * 64,
    )
    fault = _held(release, 2, "step8")
    with Pipeline(small_svd(3, steps=12), latents_folder=str(latents), fault=fault) as pipeline:
        handle = pipeline.submit(request)
        while not tensor_files.saved_steps(latents, "a" * 64):
            assert not handle.done()
        assert handle.cancel()
        release.touch()
        with pytest.raises(CancelledError):
            handle.result(HANG_SECONDS)
    assert list(out.iterdir()) == list(latents.iterdir()) == []
