"""Full or read-only disks: the run reports them, early if possible, and loses no clip."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from svdpp.media.video import read_frames
from tests.cli.shell import DEMO, PHOTO, PYTHONPATH, TINY, Answer, assert_error, svdpp_and_modules
from tests.driver.dummies import HANG_SECONDS
from tests.faults.processes import wait_until
from tests.small_disk import small_disk


@pytest.fixture(params=["/proc", "mounted read-only", "without permission"])
def closed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder that is not writable, in each way that is possible for this user."""
    if request.param == "/proc":
        yield Path("/proc/svdpp")
    elif request.param == "mounted read-only":
        with small_disk(tmp_path / "disk", "ro,size=64k") as disk:
            yield disk
    else:
        if os.geteuid() == 0:
            pytest.skip("root may write anywhere")
        (tmp_path / "locked").mkdir(mode=0o500)
        yield tmp_path / "locked"


@pytest.mark.long
def test_a_closed_folder_is_found_before_anything_is_loaded(closed: Path, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    run = ("run", PHOTO, *DEMO, *TINY, "--out", str(closed), "--log-file", str(log))
    answer, loaded = svdpp_and_modules(*run)

    assert_error(answer, 8, repr(str(closed)))
    assert log.read_text() == ""  # a rank reports there that it is ready
    assert "svdpp.media.output_files" in loaded
    assert "diffusers" not in loaded


@pytest.mark.processes
def test_a_disk_that_fills_up_keeps_the_clips_that_are_whole(tmp_path: Path) -> None:
    """If no disk can be mounted, `test_a_full_disk_ends_the_run` uses a file limit instead."""
    plan, gate = tmp_path / "plan.json", tmp_path / "gate"
    stop = {"kind": "hang", "rank": 0, "clip": 4, "place": "encode", "until": str(gate)}
    plan.write_text(json.dumps({"events": str(tmp_path / "events"), "stop": stop}))
    with small_disk(tmp_path / "disk", "size=4m") as disk:
        run = ("run", PHOTO, *DEMO, *TINY, "--seeds", "1-20", "--out", str(disk), "-q")
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.injected", str(plan), *run, "--world", "2"],
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            try:
                _wait_for(disk / "rocket_2.mp4.json", process)
                _fill(disk / "filler")
                gate.touch()
                out, err = process.communicate(timeout=HANG_SECONDS)
            finally:
                process.kill()
        clips = sorted(disk.glob("*.mp4"))

        assert_error(Answer(process.returncode, out, err), 8, "No space left on device")
        assert {disk / "rocket_1.mp4", disk / "rocket_2.mp4"} <= set(clips)
        assert len(clips) < 20
        for clip in clips:
            assert len(read_frames(clip, "mp4")) == 2
        assert [name for name in os.listdir(disk) if name.startswith(".")] == []


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    def is_there() -> bool:
        assert process.poll() is None, process.communicate()
        return path.exists()

    wait_until(is_there, HANG_SECONDS, f"no {path.name}")


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(512)):
            pass
