"""The disk space check uses the real file system, and its factors hold for real clips."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from svdpp.config import OutputConfig, SvdSampling, VideoFormat
from svdpp.driver.jobs import check_space, estimated_bytes, free_bytes
from svdpp.errors import OutputError
from svdpp.media.inputs import example_photos
from svdpp.media.video import Frames, write_clip
from tests.small_disk import small_disk


def grainy_clip(num_frames: int, side: int) -> Frames:
    """A slow zoom into a photograph, with grain like that of a camera in poor light."""
    image = Image.open(example_photos()[0]).convert("RGB")
    frames = [
        np.asarray(image.resize((side, side), box=(4 * i, 4 * i, 512 - 4 * i, 512 - 4 * i)))
        for i in range(num_frames)
    ]
    grain = np.random.default_rng(0).normal(0, 6, (num_frames, side, side, 3))
    return np.clip(np.stack(frames) + grain, 0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    ("format", "crf"),
    [("mp4", 0), ("mp4", 18), ("mp4", 30), ("gif", 18), ("webp", 18), ("frames", 18)],
)
def test_a_photograph_s_clip_takes_what_is_estimated_at_most(
    tmp_path: Path, format: VideoFormat, crf: int
) -> None:
    frames = grainy_clip(7, 128)
    output = OutputConfig(path=str(tmp_path / "x"), format=format, crf=crf)
    write_clip(frames, output, fps=7, metadata={"text": "x" * 2000})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    taken = sum(path.stat().st_size for path in files)
    sampling = SvdSampling(num_frames=7, height=128, width=128)
    estimated = estimated_bytes(format, crf, sampling)

    # At most six times, because a much larger estimate would refuse clips that fit.
    assert taken < estimated < 6 * taken


def test_free_space_is_the_file_system_s(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    expected = status.f_bavail * status.f_frsize

    for folder in (tmp_path, tmp_path / "not" / "yet" / "there"):
        assert free_bytes(folder) == pytest.approx(expected, rel=0.05)
    assert sorted(tmp_path.iterdir()) == []


def test_clips_that_cannot_fit_are_refused(tmp_path: Path) -> None:
    size = SvdSampling(num_frames=25, height=576, width=1024)
    check_space(tmp_path, 0, "mp4", 18, size)
    check_space(tmp_path, 1, "mp4", 18, size)
    too_many = free_bytes(tmp_path) // estimated_bytes("mp4", 18, size) + 1000

    with pytest.raises(OutputError) as caught:
        check_space(tmp_path, too_many, "mp4", 18, size)
    assert caught.value.exit_code == 8
    assert f"{too_many} clips of 25 frames, 1024x576, as mp4 need about" in caught.value.message
    assert repr(str(tmp_path)) in caught.value.message
    assert "GB are free" in caught.value.message
    assert "--out" in caught.value.hint


def test_a_small_disk(tmp_path: Path) -> None:
    size = SvdSampling(num_frames=14, height=128, width=128)
    with small_disk(tmp_path / "disk", "size=256k") as disk:
        check_space(disk / "out", 3, "mp4", 18, size)
        with pytest.raises(OutputError, match=r"need about 285\.7 kB .*, where 262\.1 kB are free"):
            check_space(disk / "out", 4, "mp4", 18, size)
