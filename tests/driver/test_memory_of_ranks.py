"""The estimate of each rank's memory, and the decode chunk that fits into it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from svdpp.config import DEMO_SAMPLING, ModelConfig, PipelineConfig, SvdSampling
from svdpp.driver import memory
from svdpp.driver.memory import estimate_ranks, fit_decode_chunk
from svdpp.errors import OutOfMemoryError
from tests.cli.shell import DEMO, PHOTO, TINY, svdpp_here

DEMO_CONFIG = PipelineConfig(
    world_size=2, model=ModelConfig(name="demo"), sampling=SvdSampling(**DEMO_SAMPLING)
)


@pytest.mark.long
def test_ranks_hold_what_their_actions_need() -> None:
    sampling = SvdSampling(num_inference_steps=3, height=32, width=32, num_frames=2)
    config = PipelineConfig(world_size=3, model=ModelConfig(name="demo"), sampling=sampling)

    first, between, last = estimate_ranks(config)

    assert memory._RANK_BYTES < between < min(first, last)


def _estimated(config: PipelineConfig, **_: object) -> list[int]:
    """Two ranks of 1000 bytes, of which the last takes 100 more for each frame in its chunk."""
    assert isinstance(config.sampling, SvdSampling)
    assert config.sampling.decode_chunk_size is not None
    return [1000, 1000 + 100 * config.sampling.decode_chunk_size]


@pytest.fixture
def estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "estimate_ranks", _estimated)


@pytest.mark.usefixtures("estimated")
@pytest.mark.parametrize(
    ("device", "free", "chunk"),
    [
        ("cpu", 2100, 1),  # more than 80%, and still there
        ("cpu", 2750, 2),
        ("cpu", 2749, 1),
        ("cpu", 4249, 13),
        ("cpu", 4250, 14),
        ("cpu", 10**9, 14),
        ("cuda:0", 2750, 2),  # shared by both ranks
        ("cuda", 1500, 2),  # of the last rank alone
    ],
)
def test_the_largest_chunk_leaves_a_fifth_free(
    device: str, free: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_gpu = {"cuda:0" if device == "cuda:0" else "cuda:1": free}
    monkeypatch.setattr(memory, "free_bytes", of_gpu.__getitem__)
    monkeypatch.setattr(memory, "available_bytes", lambda: free)
    found, why = fit_decode_chunk(replace(DEMO_CONFIG, device=device))
    assert found == chunk
    assert why.startswith(f"{chunk} of 14 frames at a time: 0.0 GiB by estimate, ")


@pytest.mark.usefixtures("estimated")
def test_one_frame_that_does_not_fit_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 2099)
    with pytest.raises(OutOfMemoryError, match="one frame decoded at a time") as caught:
        fit_decode_chunk(DEMO_CONFIG)
    assert "--height" in caught.value.hint


@pytest.mark.long
def test_larger_frames_fit_in_smaller_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = []
    for side in (128, 256):
        sampling = replace(DEMO_CONFIG.sampling, height=side, width=side)
        monkeypatch.setattr(memory, "available_bytes", lambda: 1250 * 2**20)
        chunks.append(fit_decode_chunk(replace(DEMO_CONFIG, sampling=sampling))[0])
    assert chunks[0] == 14
    assert 1 < chunks[1] < 14


@pytest.mark.processes
@pytest.mark.long
def test_run_records_what_auto_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = ("run", PHOTO, *DEMO, *TINY, "--world", "2", "--decode-chunk-size", "auto")
    answer = svdpp_here(*run)

    assert answer.code == 0, answer
    assert "decode: 2 of 2 frames at a time: " in answer.err
    record = json.loads((tmp_path / "out/rocket_0.mp4.json").read_text())
    assert record["decode_chunk_size"] == 2
