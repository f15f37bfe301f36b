"""Drafts on request: in one pipeline some clips are drafts, the others take the layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ClipRequest, DraftConfig, OutputConfig
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import RequestError
from svdpp.media.examples import example_photos
from svdpp.verification.reference import run_reference
from svdpp.worker.messages import DraftDone, Event
from tests.driver.dummies import HANG_SECONDS, clips, config
from tests.models.small_svd import small_svd

PHOTO = str(example_photos()[0])


@pytest.mark.long
@pytest.mark.processes
def test_drafts_and_other_clips_alternate_with_the_bits_of_one_device(tmp_path: Path) -> None:
    settings = small_svd(
        3,
        steps=8,
        split="dithered",
        draft=DraftConfig(start_steps=(0, 3, 5)),
        draft_on_request=True,
    )
    drafted: list[int] = []

    def note(rank: int, event: Event) -> None:  # noqa: ARG001
        if isinstance(event, DraftDone):
            drafted.append(event.clip)

    pipeline = Pipeline(settings)
    pipeline.observe(note)
    asks = [False, True, True, False, False, True, False]
    plain = [ClipRequest(seed=seed, image=PHOTO) for seed in range(len(asks))]
    requests = [
        replace(
            request, draft=asked, output=OutputConfig(path=str(tmp_path / f"{request.seed}.mp4"))
        )
        for request, asked in zip(plain, asks, strict=True)
    ]
    with pipeline:
        results = pipeline.run(requests[:4])
        results += [pipeline.submit(each).result(HANG_SECONDS) for each in requests[4:]]
    expected = run_reference(settings.alone(), plain)
    for result, bits in zip(results, expected, strict=True):
        assert {name: result.metadata[name] for name in bits} == bits, result.clip
    assert drafted == [clip for clip, asked in enumerate(asks) if asked]
    names = [f"{seed}.mp4{suffix}" for seed in range(len(asks)) for suffix in ("", ".json")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.processes
def test_a_draft_is_cancelled_like_any_clip() -> None:
    settings = config(3, steps=6, draft=DraftConfig(start_steps=(0, 2, 4)), draft_on_request=True)
    with Pipeline(settings) as pipeline:
        handles = pipeline.submit([replace(each, draft=True) for each in clips(*range(40))])
        handles += pipeline.submit(clips(*range(40, 60)))
        assert all(handle.cancel() for handle in handles[20:40])
        made = {result.clip for result in pipeline.results()}
        assert made.isdisjoint(range(21, 40))
        assert made >= {*range(20), *range(40, 60)}


@pytest.mark.parametrize("changes", [{}, {"draft": DraftConfig(start_steps=(0, 2))}])
@pytest.mark.processes
def test_a_pipeline_without_drafts_on_request_refuses_them(changes: dict[str, Any]) -> None:
    with Pipeline(config(2, steps=6, **changes)) as pipeline:
        with pytest.raises(RequestError, match="asks for a draft"):
            pipeline.submit(ClipRequest(seed=0, draft=True))
        assert pipeline.run(ClipRequest(seed=0)).clip == 0


def test_drafts_on_request_need_start_steps() -> None:
    with pytest.raises(RequestError, match="needs a draft"):
        config(2, draft_on_request=True)
