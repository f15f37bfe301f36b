"""Clips with sampling parameters of their own, in one pipeline: the bits of diffusers for each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ClipRequest, OutputConfig, SvdSampling
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import ClipWork, resolve
from svdpp.errors import RequestError
from svdpp.media.image import fit_photo, read_photo
from svdpp.media.inputs import example_photos
from svdpp.media.video import frames_sha256, read_frames
from svdpp.verification.verify import run_reference
from svdpp.worker.tensor_files import tensor_sha256
from tests.driver.dummies import config
from tests.models.builders import small_svd
from tests.models.range_checks import latents_and_frames

PHOTO = str(example_photos()[0])

_CHANGES: list[dict[str, Any]] = [
    {},
    {"num_inference_steps": 9},
    {"num_inference_steps": 2},
    {"num_inference_steps": 1, "num_frames": 3},
    {"height": 64, "width": 96, "fit": "crop"},
    {"fps": 12, "motion_bucket_id": 200, "noise_aug_strength": 0.1},
    {"max_guidance_scale": 1.0},
    {"min_guidance_scale": 1.5, "max_guidance_scale": 2.5, "decode_chunk_size": 1},
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.processes
def test_each_clip_has_the_bits_of_diffusers(tmp_path: Path) -> None:
    pipeline_config = small_svd(3, split="alternating")
    sampling = pipeline_config.sampling
    requests = [
        ClipRequest(
            seed=seed,
            image=PHOTO,
            sampling=replace(sampling, **changes),
            output=OutputConfig(path=str(tmp_path / f"{seed}.mp4")),
        )
        for seed, changes in enumerate(_CHANGES)
    ]
    with Pipeline(pipeline_config) as pipeline:
        results = pipeline.run(requests)
        assert {span.action.clip for span in pipeline.replayed(requests)} == set(
            range(len(_CHANGES))
        )
    for result in results:
        own = result.request.sampling or pipeline.config.sampling
        image = fit_photo(read_photo(Path(PHOTO))[0], own.width, own.height, own.fit)
        model = pipeline_config.model
        latents, frames = latents_and_frames(model, own, result.request, image)
        assert result.metadata["latents_sha256"] == tensor_sha256(latents[-1]), own
        assert result.metadata["frames_sha256"] == frames_sha256(frames), own
    assert len(read_frames(tmp_path / "3.mp4", "mp4")) == 3
    assert read_frames(tmp_path / "4.mp4", "mp4").shape[1:3] == (64, 96)


def test_the_pipelines_own_values_fill_those_that_a_clip_leaves_open() -> None:
    pipeline_config, checkpoint = resolve(small_svd(2))
    own = replace(pipeline_config.sampling, num_frames=14, decode_chunk_size=4)
    work = ClipWork(replace(pipeline_config, sampling=own), checkpoint)
    request = ClipRequest(seed=0, sampling=replace(own, num_frames=None, decode_chunk_size=None))
    assert work.resolved(request).sampling is None  # the same as the pipeline's
    short = replace(own, num_frames=3, decode_chunk_size=None)
    assert work.resolved(replace(request, sampling=short)).sampling == replace(
        short, decode_chunk_size=3
    )


@pytest.mark.processes
def test_what_a_pipeline_cannot_run_is_refused_by_name() -> None:
    def clip(steps: int) -> ClipRequest:
        return ClipRequest(seed=0, sampling=SvdSampling(num_inference_steps=steps))

    with Pipeline(config(2)) as pipeline:
        with pytest.raises(RequestError, match="5 steps cannot be split evenly over 2 ranks"):
            pipeline.submit(clip(5))
        assert pipeline.run(ClipRequest(seed=0)).clip == 0
    with pytest.raises(RequestError, match="sampling parameters"):
        run_reference(config(1), [clip(8)])
