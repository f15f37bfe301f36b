"""Row: other numbers of threads are refused and explained; more threads than cores still end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.shell import DEMO, assert_error, svdpp_here

NO_HASH = "0" * 64
CLIP = {
    **{"schema_version": 1, "input": "a.jpg", "input_sha256": NO_HASH, "output": "a_0.mp4"},
    **{"seed": 0, "latents_sha256": NO_HASH, "frames_sha256": NO_HASH},
    **{"model": "demo", "revision": None, "variant": None, "dtype": "fp32", "memory_opt": False},
    **{"device": "cpu", "num_threads": 1, "num_inference_steps": 2, "height": 64, "width": 64},
    **{"num_frames": 2, "fps": 7, "motion_bucket_id": 40, "noise_aug_strength": 0.02},
    **{"min_guidance_scale": 1.0, "max_guidance_scale": 1.1, "decode_chunk_size": 2},
    **{"fit": "stretch", "format": "mp4", "crf": 18},
}


def test_a_clip_is_not_recomputed_under_other_threads(tmp_path: Path) -> None:
    path = tmp_path / "a_0.json"
    path.write_text(json.dumps(CLIP))
    answer = svdpp_here("verify", str(path), "--threads", "2")
    assert_error(answer, 2, "'a_0.mp4' was made with --threads 1: with 2", "omit --threads")


@pytest.mark.long
@pytest.mark.processes
def test_four_times_more_threads_than_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that spin while they wait would take minutes of each other's time."""
    monkeypatch.chdir(tmp_path)
    threads = str(4 * len(os.sched_getaffinity(0)))
    asked = "--gpus 3 --split alternating --dtype bf16 --steps 9 --frames 3 --height 40 --width 48"
    answer = svdpp_here("verify", *DEMO, "--threads", threads, *asked.split())
    assert answer.code == 0, answer
    assert "bitwise equal: 2 clips" in answer.out
