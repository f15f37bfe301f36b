"""Every row on real ranks: the bits of diffusers' unmodified pipelines, and of a resumed clip."""

from __future__ import annotations

from pathlib import Path

import pytest

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig
from svdpp.driver.pipeline import Pipeline
from svdpp.media.examples import example_photos
from svdpp.media.image import fit_photo, read_photo
from svdpp.media.video import frames_sha256
from svdpp.worker.tensor_store import audio_hashes, tensor_sha256
from tests.models.diffusers_pipeline import whole_clip
from tests.models.test_rows import CASES
from tests.models.tiny_rows import save_tiny

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.processes]

PHOTO = example_photos()[0]
THREE = ("ltx2-image", "cogvideox-dpm")


@pytest.mark.parametrize("name", CASES)
def test_ranks_give_the_bits_of_diffusers(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    save_tiny(case.family, tmp_path, image=case.image, **case.changes)
    model, sampling = ModelConfig(name=str(tmp_path)), case.config()
    request = ClipRequest(seed=3, prompt="the sea", image=str(PHOTO) if case.image else None)
    image = None
    if case.image:
        image = fit_photo(read_photo(PHOTO)[0], sampling.width, sampling.height, sampling.fit)
    latents, frames, audio = whole_clip(model, sampling, request, image)
    config = PipelineConfig(
        world_size=3 if name in THREE else 2, model=model, sampling=sampling, split="balanced"
    )
    with Pipeline(config) as pipeline:
        metadata = pipeline.run([request])[0].metadata
    assert metadata["latents_sha256"] == tensor_sha256(latents[-1])
    assert metadata["frames_sha256"] == frames_sha256(frames)
    hashes = audio_hashes(audio)
    assert {name: metadata.get(name) for name in hashes} == hashes
