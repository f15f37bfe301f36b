"""A finished clip keeps its number of threads; more threads than cores still end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.shell import DEMO, assert_error, svdpp_here
from tests.verification.clips import put_clip


def test_a_clip_is_not_recomputed_under_other_threads(tmp_path: Path) -> None:
    put_clip(tmp_path, "a", num_threads=1)
    answer = svdpp_here("verify", str(tmp_path / "a.mp4"), "--threads", "2")
    assert_error(answer, 2, "no effect on a finished clip: --threads", "leave that out")


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
