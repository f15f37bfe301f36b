"""Rank 0's questions to other hosts, answered from their folders."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svdpp.config import (
    ClipRequest,
    ModelConfig,
    OutputConfig,
    PipelineConfig,
    SvdSampling,
)
from svdpp.driver import hosts
from svdpp.driver.jobs import ClipPlan, OutputPolicy
from svdpp.driver.liveness import silence_limit
from svdpp.driver.ranks import shared_settings
from svdpp.errors import OutputError, RequestError, SvdppError
from svdpp.media import output_files, video
from svdpp.media.image import read_photo
from svdpp.media.inputs import ClipInput
from svdpp.models.checkpoint import find_checkpoint
from svdpp.worker.clip_metadata import clip_metadata
from tests.cli.shell import PHOTO

CONFIG = PipelineConfig(
    world_size=2,
    model=ModelConfig(name="demo"),
    sampling=SvdSampling(num_inference_steps=2, height=32, width=32, num_frames=2),
)


def _plan(folder: Path, seeds: tuple[int, ...] = (1, 2), key: str | None = None) -> ClipPlan:
    _, photo = read_photo(Path(PHOTO))
    config = replace(CONFIG, sampling=CONFIG.sampling.resolved(model_frames=14))
    checkpoint = find_checkpoint(CONFIG.model)
    outputs = [OutputConfig(path=str(folder / f"rocket_{seed}.mp4")) for seed in seeds]
    return ClipPlan(
        requests=[
            ClipRequest(seed=seed, output=output, latents_key=key)
            for seed, output in zip(seeds, outputs, strict=True)
        ],
        metadata=[
            clip_metadata(ClipInput(photo), seed, output, config, checkpoint)
            for seed, output in zip(seeds, outputs, strict=True)
        ],
    )


def _finish(record: Mapping[str, Any], folder: Path, **changes: Any) -> None:
    """Writes a clip to the other host's folder."""
    frames = np.zeros((2, 32, 32, 3), np.uint8)
    whole = {**record, "latents_sha256": "0" * 64, "frames_sha256": "0" * 64, **changes}
    output = OutputConfig(path=str(folder / record["output"]))
    folder.mkdir(exist_ok=True)
    video.write_clip(frames, output, fps=7, metadata=whole)
    output_files.write_json(Path(output.json_path), whole)


class _Host1:
    """Answers from its own folders."""

    def __init__(self, there: OutputPolicy) -> None:
        self.there = there
        self.sent_away: list[BaseException | None] = []

    def ask(self, question: bytes) -> dict[str, bytes]:
        return {"host1": hosts.answer(question, self.there)}

    def dismiss(self, error: BaseException | None = None) -> None:
        self.sent_away.append(error)


def test_a_clip_that_another_host_holds_is_not_made_again(tmp_path: Path) -> None:
    here, there = (OutputPolicy(folder=tmp_path / name, resume=True) for name in ("here", "there"))
    plan = _plan(here.folder)
    plan.metadata[1]["input"] = os.fsdecode(b"\xe9.jpg")  # a name that is not UTF-8
    _finish(plan.metadata[1], there.folder)
    left = hosts.without_those_elsewhere(plan, here, _Host1(there))
    assert [request.seed for request in left.requests] == [1]
    assert [record["seed"] for record in left.metadata] == [1]
    (skipped,) = left.skipped
    assert [skipped[name] for name in ("output", "input", "host")] == [
        *("rocket_2.mp4", "\udce9.jpg", "host1")
    ]


def test_its_kept_packets_go(tmp_path: Path) -> None:
    key, kept = "a" * 64, tmp_path / "saved"
    here = OutputPolicy(folder=tmp_path / "here", resume=True, latents_folder=kept)
    plan = _plan(here.folder, (1,), key)
    _finish(plan.metadata[0], tmp_path / "there")
    kept.mkdir()
    (kept / f"{key}_step1.safetensors").touch()
    hosts.without_those_elsewhere(plan, here, _Host1(replace(here, folder=tmp_path / "there")))
    assert not list(kept.iterdir())


def test_a_clip_with_other_parameters_is_refused_by_its_host(tmp_path: Path) -> None:
    here, there = (OutputPolicy(folder=tmp_path / name, resume=True) for name in ("here", "there"))
    plan = _plan(here.folder)
    _finish(plan.metadata[0], there.folder, fps=8)
    with pytest.raises(RequestError, match=r"on host1: 'rocket_1.mp4' exists with another fps"):
        hosts.without_those_elsewhere(plan, here, _Host1(there))


def test_an_output_in_the_way_on_another_host_is_refused(tmp_path: Path) -> None:
    policy = OutputPolicy(folder=tmp_path / "out")
    plan = _plan(policy.folder)
    _finish(plan.metadata[0], policy.folder)
    host1 = _Host1(policy)
    with pytest.raises(RequestError, match="1 output exists already on host1") as refusal:
        hosts.without_those_elsewhere(plan, policy, host1)
    assert host1.sent_away == [refusal.value], "the other hosts must learn why"
    over = replace(policy, overwrite=True)
    assert hosts.without_those_elsewhere(plan, over, _Host1(over)).requests == plan.requests


def test_hand_overs_need_one_folder_for_all_hosts(tmp_path: Path) -> None:
    here = OutputPolicy(folder=tmp_path / "out", latents_folder=tmp_path / "saved")
    plan = _plan(here.folder)
    assert hosts.without_those_elsewhere(plan, here, _Host1(here)).requests == plan.requests
    there = replace(here, latents_folder=tmp_path / "another")
    with pytest.raises(RequestError, match="--latents-dir of host1 is not the folder"):
        hosts.without_those_elsewhere(plan, here, _Host1(there))
    assert not list((tmp_path / "saved").iterdir()), "the probe is gone"


def test_whatever_goes_wrong_on_another_host_is_told_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    (tmp_path / "file").touch()
    here, there = OutputPolicy(folder=tmp_path), OutputPolicy(folder=tmp_path / "file")
    with pytest.raises(OutputError, match="on host1: cannot write into"):
        hosts.without_those_elsewhere(_plan(tmp_path), here, _Host1(there))
    monkeypatch.setattr(hosts, "_answer", fail)
    host1 = _Host1(here)
    with pytest.raises(SvdppError, match=r"on host1: OSError: .*Input/output error") as refusal:
        hosts.without_those_elsewhere(_plan(tmp_path), here, host1)
    assert host1.sent_away == [refusal.value]


def test_terms_are_what_bits_and_lists_depend_on() -> None:
    ours = shared_settings(CONFIG, None)
    assert json.loads(json.dumps(ours)) == ours
    for other in (
        replace(CONFIG, num_threads=2),
        replace(CONFIG, split="dithered"),
        replace(CONFIG, model=ModelConfig(name="demo", dtype="fp16")),
        replace(CONFIG, sampling=replace(CONFIG.sampling, fps=8)),
    ):
        assert shared_settings(other, None) != ours
    assert shared_settings(replace(CONFIG, start_timeout_seconds=5), None) == ours
    assert {"torch", "svdpp", "model", "num threads"} <= ours.keys()
    here = find_checkpoint(CONFIG.model)
    there = replace(here, fingerprint="of other weights")
    assert shared_settings(CONFIG, there) != shared_settings(CONFIG, here)


def test_silence_is_noticed_before_slowness() -> None:
    assert silence_limit(CONFIG) == CONFIG.heartbeat_timeout_seconds
    assert silence_limit(replace(CONFIG, timeout_seconds=5)) == 4
