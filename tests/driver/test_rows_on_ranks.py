"""Every row on real ranks: the bits of diffusers' unmodified pipelines, and of a resumed clip."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.comm.packet import Packet
from svdpp.config import ClipRequest, ModelConfig, PipelineConfig
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import resolve
from svdpp.media.inputs import example_photos, read_source
from svdpp.media.video import frames_sha256
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine.model import load_model
from svdpp.plan.layout import Roles
from svdpp.worker.device import conditions_of
from svdpp.worker.tensor_files import LatentCheckpoints, audio_hashes, tensor_sha256
from tests.cli.shell import svdpp_here
from tests.models.range_checks import nothing, whole_clip
from tests.models.test_rows import CASES, KINDS, SIZES, chosen
from tests.models.tiny_families import save_tiny

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.processes]

PHOTO = example_photos()[0]


def _config(name: str, folder: Path) -> tuple[PipelineConfig, ClipRequest]:
    case = CASES[name]
    save_tiny(case.family, folder, image=case.image, **case.changes)
    dtype: Any = case.dtype
    model = ModelConfig(name=str(folder), family=case.family, dtype=dtype)
    is_svd = case.family == "svd"
    image = str(PHOTO) if case.image or is_svd else None
    videos = dict.fromkeys(case.config().videos, image or "")
    request = ClipRequest(seed=3, prompt=None if is_svd else "the sea", image=image, videos=videos)
    config = PipelineConfig(world_size=2, model=model, sampling=case.config(), split="balanced")
    return config, request


NAMES = {
    **{"num_inference_steps": "steps", "num_frames": "frames", "height": "height"},
    **{"width": "width", "max_sequence_length": "max-prompt-tokens"},
    "guidance_scale": "guidance-scale",
}


@pytest.mark.long
@pytest.mark.parametrize("name", chosen(KINDS))
def test_the_command_verifies_two_ranks(tmp_path: Path, name: str) -> None:
    case, (config, request) = CASES[name], _config(name, tmp_path / "model")
    sampling = vars(config.sampling)
    parameters = {key: sampling[key] for key in {**SIZES, **case.sampling} if key in sampling}
    unused = find_checkpoint(config.model).unused_parameters
    options = [
        f"--{NAMES[key]}={value}" if key in NAMES else f"--param={key}={value}"
        for key, value in parameters.items()
        if key not in unused
    ]
    answer = svdpp_here(
        *("verify", "--model", config.model.name, "--family", case.family, "--device", "cpu"),
        *("--threads", "1", "--gpus", "2", "--split", "balanced", "--dtype", case.dtype),
        *("--clips", "1", "--json", *options, *filter(None, [request.image])),
        *(f"--video={video}={path}" for video, path in request.videos.items()),
        *(("--prompt", request.prompt) if request.prompt else ()),
    )
    assert answer.code == 0, answer
    proof = json.loads(answer.out)
    assert proof["bitwise"]
    kinds = {check["what"] for check in proof["checks"]}
    assert ("audio" in kinds) == (name in ("ltx2", "ltx2-image"))


@pytest.mark.parametrize("name", chosen(KINDS))
def test_three_ranks_resume_the_clip_of_another_run(tmp_path: Path, name: str) -> None:
    config, request = _config(name, tmp_path / "model")
    config, checkpoint = resolve(config)
    assert checkpoint is not None
    sampling = config.sampling
    image = read_source(request, sampling)
    latents, frames, audio = whole_clip(config.model, sampling, request, image)
    roles = Roles(encode=True, denoise=True, decode=False)
    model = load_model(checkpoint, config.model, sampling, "cpu", roles)
    prepared = {} if image is None else model.prepare(image)
    tensors = model.denoise(model.encode(prepared, request), 0, 1, nothing)
    key = hashlib.sha256(b"clip").hexdigest()
    kept = LatentCheckpoints(tmp_path, conditions_of(config, checkpoint, "cpu"))
    kept.save(key, Packet(0, 1, 0.0, tensors))
    with Pipeline(replace(config, world_size=3), latents_folder=str(tmp_path)) as pipeline:
        again = replace(request, latents_key=key, done_steps=1)
        metadata = pipeline.run([again])[0].metadata
    assert metadata["latents_sha256"] == tensor_sha256(latents[-1])
    assert metadata["frames_sha256"] == frames_sha256(frames)
    hashes = audio_hashes(audio)
    assert {name: metadata.get(name) for name in hashes} == hashes
