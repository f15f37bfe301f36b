"""`--decode-chunk-size auto`: the formula, the choice by it, and a real measurement."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from svdpp.config import DEMO_SAMPLING, ModelConfig, PipelineConfig, SvdSampling
from svdpp.diagnostics import decode_chunk
from svdpp.diagnostics.decode_chunk import (
    DecodeMemory,
    _peak,
    _weights_of_others,
    measure_decode,
)
from svdpp.diagnostics.memory_estimate import CUDA_PROCESS_BYTES
from svdpp.driver.resolve import resolve
from svdpp.errors import OutOfMemoryError
from svdpp.launch import fork_server
from svdpp.models.memory import estimate
from svdpp.plan.layout import Roles
from tests.cli.shell import DEMO, PHOTO, TINY, svdpp_here

pytestmark = pytest.mark.long

MEMORY = DecodeMemory(num_frames=25, one_frame=100, each_in_chunk=50, each_kept=1, free=0)


@pytest.mark.parametrize(
    ("free", "chunk"),
    [(124, 1), (155, 1), (217, 1), (218, 2), (1654, 24), (1655, 25), (10**9, 25)],
)
def test_the_largest_chunk_leaves_a_fifth_free(free: int, chunk: int) -> None:
    memory = replace(MEMORY, free=free)
    assert memory.largest_chunk() == chunk
    assert chunk == 1 or memory.needed(chunk) <= 0.8 * free
    assert chunk == 25 or memory.needed(chunk + 1) > 0.8 * free


def test_one_frame_that_does_not_fit_ends_the_run() -> None:
    with pytest.raises(OutOfMemoryError, match=r"one frame at a time needs 0\.00 GiB") as caught:
        replace(MEMORY, free=123).largest_chunk()
    assert "--height" in caught.value.hint


def test_a_decoder_whose_memory_does_not_grow_takes_all_frames() -> None:
    assert replace(MEMORY, free=200, each_in_chunk=0).largest_chunk() == 25


def test_peak_is_what_is_taken_and_given_back() -> None:
    def work() -> None:
        torch.ones(2**26, dtype=torch.uint8)

    for _ in range(2):
        assert _peak(torch.device("cpu"), work) == pytest.approx(2**26, rel=0.1)


@pytest.mark.long
@pytest.mark.processes
def test_measured_memory_grows_with_the_frames_and_their_size() -> None:
    sampling = SvdSampling(**DEMO_SAMPLING)
    config = PipelineConfig(world_size=2, model=ModelConfig(name="demo"), sampling=sampling)
    small = measure_decode(config)
    large = measure_decode(replace(config, sampling=replace(sampling, height=256, width=256)))

    assert small.num_frames == large.num_frames == 14
    assert 0 < small.free < 2**63
    assert small.needed(1) < small.needed(14)
    # A frame of 128x128 has 64 channels at full size, and several such tensors are alive at a time.
    assert large.one_frame > 2 * 64 * 256 * 256 * 4
    assert large.needed(14) > 1.5 * small.needed(14)


def test_the_other_ranks_of_a_shared_gpu_take_weights_and_a_process() -> None:
    config = PipelineConfig(
        world_size=3,
        model=ModelConfig(name="demo"),
        sampling=SvdSampling(num_inference_steps=27),
        device="cuda:0",
    )
    config, checkpoint = resolve(config)
    assert checkpoint is not None
    parts = estimate(checkpoint, config.model, config.sampling, device="cuda:0")
    unet, vae = parts.denoise.weight_bytes, parts.decode.weight_bytes
    encoder = parts.encode.weight_bytes
    decoding = Roles(encode=False, denoise=True, decode=True)

    others = _weights_of_others(config, checkpoint, decoding)
    # One rank encodes and denoises, the next one denoises.
    assert others == 2 * unet + encoder + 2 * CUDA_PROCESS_BYTES
    everything = Roles(encode=True, denoise=True, decode=True)
    alone = replace(config, world_size=1)
    assert _weights_of_others(alone, checkpoint, everything) == 0
    assert unet > 0 < vae


def be_killed(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_out_of_memory(*_: object) -> None:
    raise OutOfMemoryError("out of memory while decoding", "a knob")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ending", "words", "hint"),
    [(be_killed, "was killed", "--height"), (run_out_of_memory, "while decoding", "a knob")],
)
def test_a_measurement_that_runs_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, ending: Callable[..., None], words: str, hint: str
) -> None:
    monkeypatch.setattr(decode_chunk, "_measure", ending)
    # A spawned process would not have the patch.
    monkeypatch.setattr(fork_server, "start_method", lambda device: "fork")  # noqa: ARG005
    config = PipelineConfig(world_size=1, model=ModelConfig(name="demo"))
    with pytest.raises(OutOfMemoryError, match=words) as caught:
        measure_decode(config)
    assert hint in caught.value.hint


@pytest.mark.processes
@pytest.mark.long
def test_run_records_what_auto_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = ("run", PHOTO, *DEMO, *TINY, "--world", "2", "--decode-chunk-size", "auto")
    answer = svdpp_here(*run)

    assert answer.code == 0, answer
    assert "decode: 2 of 2 frames at a time: one takes " in answer.err
    record = json.loads((tmp_path / "out/rocket_0.mp4.json").read_text())
    assert record["decode_chunk_size"] == 2
