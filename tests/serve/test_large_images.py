"""Other clips go first while the large image of a clip is prepared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from svdpp.config import ClipRequest
from svdpp.driver.pipeline import Pipeline
from svdpp.serve.job import Job, JobState
from svdpp.worker.messages import ActionDone, Event
from tests.faults.processes import allowing_for_others
from tests.serve.engines import demo_config, demo_job, latents, serving


@pytest.fixture(scope="module")
def photo_24mp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photo") / "large.jpg"
    Image.linear_gradient("L").resize((6000, 4000)).save(path)
    return path


def _large_job(folder: Path, seed: int, photo: Path) -> Job:
    return replace(demo_job(folder, seed, photo), photo_pixels=24_000_000)


@pytest.mark.processes
def test_a_small_clip_goes_before_a_large_image_and_both_have_their_bits(
    tmp_path: Path, photo_24mp: Path
) -> None:
    """An image that cannot be prepared fails its own clip only."""
    waits: dict[int, float] = {}

    def note(_: int, event: Event) -> None:
        if isinstance(event, ActionDone) and "image" in event.waits:
            waits[event.action.clip] = event.waits["image"]

    with serving(tmp_path, demo_config(), observer=note) as service:
        service.wait(lambda: service.engine.is_idle, "it is not idle")

        large = [_large_job(tmp_path, seed, photo_24mp) for seed in (1, 2, 4)]
        (tmp_path / "photos" / large[2].photo).unlink()
        done = service.made(*large[:2], demo_job(tmp_path, 3), large[2])
        lost = done.pop()
        # No rank has waited for the large images.
        assert max(waits[1], waits[2]) < allowing_for_others(0.5)
        in_order = service.made(*(demo_job(tmp_path, seed, photo_24mp) for seed in (1, 2)))
    assert lost.state is JobState.FAILED
    assert "does not exist" in (lost.error or {})["message"]
    assert {job.state for job in done + in_order} == {JobState.COMPLETED}
    assert min(done, key=lambda job: job.finished_at or 0).seed == 3
    assert latents(done[:2]) == latents(in_order)


@pytest.mark.processes
def test_a_clip_can_be_cancelled_while_its_image_is_prepared(
    tmp_path: Path, photo_24mp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preparation of the first one does not end; the next one begins all the same."""
    asked: list[ClipRequest] = []
    prepare = Pipeline.prepare_image

    def prepare_others(pipeline: Pipeline, request: ClipRequest) -> None:
        asked.append(request)
        if len(asked) > 1:
            prepare(pipeline, request)

    monkeypatch.setattr(Pipeline, "prepare_image", prepare_others)
    with serving(tmp_path, demo_config()) as service:
        service.wait(lambda: service.engine.is_idle, "it is not idle")
        ids = service.store_jobs(*(_large_job(tmp_path, seed, photo_24mp) for seed in (1, 2)))
        service.wait(lambda: asked, "nothing is prepared")
        assert not service.engine.is_idle
        assert service.engine.cancel(ids[0], 60)
        done = service.wait_final(ids)
        service.wait(lambda: service.engine.is_idle, "it is not idle")
    assert [job.state for job in done] == [JobState.CANCELLED, JobState.COMPLETED]
