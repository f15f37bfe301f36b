"""Photographs are read one ahead, in order, and a bad one fails only its own clip."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from svdpp.config import ClipRequest, SamplingConfig, SvdSampling
from svdpp.errors import InputError
from svdpp.media import inputs as files
from svdpp.worker.side_threads import PhotoReader

SAMPLING = SvdSampling(height=16, width=24, num_frames=2)
CPU = torch.device("cpu")


def _first_pixel(image: Image.Image, _: SamplingConfig) -> dict[str, torch.Tensor]:
    """Replaces a model's preparation."""
    return {"pixel": torch.tensor(image.getpixel((0, 0)))}


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"{shade}.png" for shade in (10, 20, 30)]
    for path in made:
        Image.new("RGB", (48, 32), (int(path.stem),) * 3).save(path)
    return made


def _requests(paths: list[Path]) -> list[tuple[int, ClipRequest]]:
    return [
        (clip, ClipRequest(seed=0, image=str(path), sampling=SAMPLING))
        for clip, path in enumerate(paths)
    ]


def test_each_photograph_comes_fitted_to_its_own_clip(paths: list[Path]) -> None:
    reader = PhotoReader(_first_pixel, CPU)
    reader.expect(_requests(paths[:2]))
    reader.expect([(2, _requests(paths)[2][1]), (3, ClipRequest(seed=1, sampling=SAMPLING))])
    for clip, shade in enumerate((10, 20, 30)):
        assert reader.take(clip)["pixel"].tolist() == [shade] * 3
    assert reader.take(3) == {}
    reader.close()


def test_one_photograph_is_read_ahead_and_no_more(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    second, read_bytes = threading.Event(), files.read_bytes

    def noting(path: Path) -> bytes:
        read.append(path.stem)
        if len(read) == 2:
            second.set()
        return read_bytes(path)

    monkeypatch.setattr(files, "read_bytes", noting)
    reader = PhotoReader(_first_pixel, CPU)
    reader.expect(_requests(paths))
    reader.take(0)
    assert second.wait(30)
    reader._thread.submit(int).result()  # all calls queued before are done now
    assert read == ["10", "20"]
    reader.close()


def test_others_go_first_while_a_photograph_is_prepared_early(paths: list[Path]) -> None:
    may_end, prepared = threading.Event(), threading.Event()
    shades: list[object] = []

    def slow(image: Image.Image, sampling: SamplingConfig) -> dict[str, torch.Tensor]:
        shades.append(image.getpixel((0, 0)))
        assert image.getpixel((0, 0)) != (10, 10, 10) or may_end.wait(30)
        return _first_pixel(image, sampling)

    reader = PhotoReader(slow, CPU)
    large, *small = (request for _, request in _requests(paths))
    reader.prepare_early(large, lambda _: prepared.set())
    reader.expect(enumerate(small))
    assert [reader.take(clip)["pixel"].tolist()[0] for clip in (0, 1)] == [20, 30]
    assert not prepared.is_set()
    may_end.set()
    assert prepared.wait(30)
    reader.expect([(2, replace(large, seed=5)), (3, replace(large, image=str(paths[1])))])
    assert [reader.take(clip)["pixel"].tolist()[0] for clip in (2, 3)] == [10, 20]
    assert shades.count((10, 10, 10)) == 1
    reader.close()


def test_a_photograph_that_went_bad_spoils_no_other(paths: list[Path]) -> None:
    reader = PhotoReader(_first_pixel, CPU)
    paths[1].unlink()
    changed = replace(_requests(paths)[2][1], image_sha256="0" * 64)
    requests = [*_requests(paths[:2]), (2, changed), (3, _requests(paths)[0][1])]
    reader.expect(requests)
    assert reader.take(0)
    with pytest.raises(InputError, match=r"20\.png"):
        reader.take(1)
    with pytest.raises(InputError, match="has changed since the run began"):
        reader.take(2)
    assert reader.take(3)
    reader.close()
