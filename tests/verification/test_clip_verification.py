"""Verification of clips: reasons for differences, and memory pressure as one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.verification.clip_files import ClipOnDisk
from svdpp.verification.clip_verification import compare_hashes
from svdpp.verification.reference import _Recorder
from svdpp.verification.reference_setup import ReferenceSetup
from svdpp.worker.device import MemoryPressure
from svdpp.worker.messages import ClipDone


class _EventList:
    """Stand-in for a rank's reporter, which keeps the events in a list."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, event: Any) -> None:
        self.sent.append(event)


HASHES = {"latents_sha256": "1", "frames_sha256": "2"}
PRESSED = {"memory_pressure": True}
MADE = "GPU memory was short when the clip was made"
COMPUTED = "GPU memory was short in the reference"


@pytest.mark.parametrize(
    ("metadata", "recomputed", "reason"),
    [
        ({}, {}, ""),
        ({"exact": "unproven"}, {}, 'the metadata of the clip say "exact": "unproven"'),
        ({"exact": "unproven", "cfg_parallel": 2}, {}, "a pair of ranks divided batches"),
        (PRESSED, {}, MADE),
        (PRESSED, PRESSED, MADE),
        ({}, PRESSED, COMPUTED),
        ({"exact": "unproven", "cfg_parallel": 2}, PRESSED, COMPUTED),
    ],
)
def test_a_difference_comes_with_the_reason_that_is_known(
    metadata: dict[str, Any], recomputed: dict[str, Any], reason: str
) -> None:
    about = {"exact": True, **HASHES, **metadata}
    clip = ClipOnDisk(path=Path("a.mp4"), json_path=None, raw=about, metadata=about)
    latent, frames = compare_hashes(clip, {**HASHES, "frames_sha256": "3", **recomputed})
    assert (latent.what, latent.equal) == ("latent", True)
    assert (frames.what, frames.equal) == ("frames", False)
    assert (frames.recorded, frames.found) == ("2", "3")
    assert frames.detail.startswith(reason)
    assert bool(frames.detail) == bool(reason)


def test_only_a_clip_with_a_hash_of_its_sound_has_that_compared() -> None:
    about = {"exact": True, **HASHES, "audio_sha256": "4"}
    clip = ClipOnDisk(path=Path("a.mp4"), json_path=None, raw=about, metadata=about)
    checks = list(compare_hashes(clip, HASHES))
    assert [(check.what, check.equal) for check in checks] == [
        *(("latent", True), ("frames", True), ("audio", False))
    ]


@pytest.mark.parametrize("is_short", [False, True])
def test_the_reference_marks_a_clip_for_which_gpu_memory_ran_short(
    monkeypatch: pytest.MonkeyPatch, is_short: bool
) -> None:
    monkeypatch.setattr(MemoryPressure, "has_occurred", lambda _: is_short)
    config = PipelineConfig(
        world_size=1,
        model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8)),
        sampling=SvdSampling(num_inference_steps=1),
    )
    setup = ReferenceSetup(
        config=config,
        checkpoint=None,
        requests=(),
        steps=frozenset(),
        folder=None,
        predictions=False,
    )
    reporter = _EventList()
    recorder = _Recorder(setup, "cpu", cast("Any", reporter))
    recorder.begin(0)
    recorder.end(torch.zeros(1, 4, 2, 8, 8), None, None)
    (event,) = reporter.sent
    assert isinstance(event, ClipDone)
    assert event.metadata.get("memory_pressure", False) is is_short
