"""SVD-XT's own size with random weights: exact, repeatable, within the memory estimate, as fast."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.driver.memory import estimate_ranks
from svdpp.verification.verify import compare, run_pipelined, run_sequential
from svdpp.worker.messages import Event, Finished, StepDone
from tests.gpu.machine import Machine, Report, python

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

# One process each, since torch reads most of them once.
FLAGS = {
    "torch's own settings": "",
    "the same again": "",
    "deterministic algorithms": "torch.use_deterministic_algorithms(True)",
    "cuDNN TF32 off": "torch.backends.cudnn.allow_tf32 = False",
    "matmul TF32 on": "torch.backends.cuda.matmul.allow_tf32 = True",
    "cuDNN benchmark": "torch.backends.cudnn.benchmark = True",
    "no flash attention": "torch.backends.cuda.enable_flash_sdp(False)",
    "no cuDNN attention": "torch.backends.cuda.enable_cudnn_sdp(False)",
}


class _Listener:
    """Steps' seconds by clip, and each rank's peak of allocated bytes."""

    def __init__(self) -> None:
        self.seconds: dict[int, list[float]] = {}
        self.peaks: dict[int, Finished] = {}

    def __call__(self, rank: int, event: Event) -> None:
        if isinstance(event, StepDone):
            self.seconds.setdefault(event.clip, []).append(event.seconds)
        elif isinstance(event, Finished):
            self.peaks[rank] = event

    def median(self, clip: int) -> float:
        return statistics.median(self.seconds[clip])


def _config(machine: Machine, folder: Path, world_size: int = 2) -> PipelineConfig:
    size: dict[str, Any] = {"height": 576, "width": 1024, "decode_chunk_size": 8}
    if machine.is_small:
        size = {"height": 64, "width": 64, "num_frames": 2}
    return PipelineConfig(
        world_size=world_size,
        model=ModelConfig(name=str(folder), dtype=machine.dtype),
        sampling=SvdSampling(num_inference_steps=4, **size),
        device=machine.shared,
    )


def test_two_ranks_are_exact_within_their_memory_and_as_fast_as_diffusers(
    machine: Machine, report: Report, full_size: Path, tmp_path: Path
) -> None:
    config = _config(machine, full_size)
    requests = machine.requests(2)
    ours, theirs = _Listener(), _Listener()
    run_pipelined(config, requests, tmp_path, observers=[ours])
    run_sequential(config, requests, tmp_path, observers=[theirs])
    result = compare(config, 2, tmp_path)
    estimates = estimate_ranks(config)
    needed = [each.weight_bytes + each.activation_bytes for each in estimates]
    peaks = [ours.peaks[rank].allocated_bytes or 0 for rank in range(2)]
    ratios = [peak / need for peak, need in zip(peaks, needed, strict=True)]
    report.add(
        f"full size, {config.sampling.height}x{config.sampling.width}, 2 ranks, 4 steps, 2 clips",
        bitwise=result.bitwise,
        step_seconds_of_a_rank=ours.median(1),
        step_seconds_of_diffusers=theirs.median(1),
        peak_gib_by_rank=[round(peak / 2**30, 2) for peak in peaks],
        peak_over_estimate_by_rank=[round(ratio, 3) for ratio in ratios],
    )
    assert result.bitwise, result.first_difference
    if not machine.is_small:
        assert all(0.9 <= ratio <= 1.1 for ratio in ratios), ratios


def test_a_rank_alone_takes_diffusers_own_time_for_a_step(
    machine: Machine, report: Report, full_size: Path, tmp_path: Path
) -> None:
    """One rank, so that nobody shares the GPU; in turn with diffusers' own loop."""
    config = _config(machine, full_size, world_size=1)
    requests = machine.requests(2)
    ratios = []
    for number in range(1 if machine.is_small else 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        ours, theirs = _Listener(), _Listener()
        run_pipelined(config, requests, folder, observers=[ours])
        run_sequential(config, requests, folder, observers=[theirs])
        ratios.append(ours.median(1) / theirs.median(1))
    report.add("full size, step of a rank / of diffusers", ratios=[round(r, 4) for r in ratios])
    if not machine.is_small:
        assert min(ratios) <= 1.01, ratios


_STEP_AND_DECODE = """
import hashlib, json, sys
import torch
from svdpp.comm import streams
from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.driver.resolve import resolve
from svdpp.models.base import LATENTS
from svdpp.plan.layout import Roles
from svdpp.worker.rank import load_model
from tests.models.probe import probe_packet
asked = json.loads(sys.argv[1])
device = torch.device(asked["device"])
streams.use_device(device)
torch.set_num_threads(1)
exec(asked["flag"])
model = ModelConfig(name=asked["folder"], dtype=asked["dtype"])
sampling = SvdSampling(num_inference_steps=4, **asked["sampling"])
config = PipelineConfig(world_size=1, model=model, sampling=sampling, device=asked["device"])
config, checkpoint = resolve(config)
model = load_model(config, checkpoint, str(device), Roles(encode=False, denoise=True, decode=True))
tensors, copies = probe_packet(model, dtype=asked["dtype"]), streams.SideStream(device)
last = probe_packet(model, dtype=asked["dtype"], has_stepped=True)
def digest(tensor):
    host = copies.to_host(tensor.contiguous(), streams.mark(device))
    return hashlib.sha256(host.view(torch.uint8).numpy().tobytes()).hexdigest()
found = {"step": [], "decode": []}
with torch.no_grad():
    for _ in range(2):
        found["step"].append(digest(model.denoise(tensors, 0, 1, lambda *_: None)[LATENTS]))
        found["decode"].append(digest(model.decode({**last, LATENTS: last[LATENTS] * 0.1})))
print(json.dumps(found))
"""


def _bits(machine: Machine, folder: Path, flag: str) -> dict[str, list[str]]:
    """Hashes of one step and one decode, each done twice, in a process with `flag` set."""
    size = {"height": 64, "width": 64} if machine.is_small else {"height": 320, "width": 512}
    asked = {
        "device": machine.shared,
        "folder": str(folder),
        "dtype": machine.dtype,
        "sampling": {**size, "decode_chunk_size": 2},
        "flag": flag,
    }
    printed = python("-c", _STEP_AND_DECODE, json.dumps(asked))
    bits: dict[str, list[str]] = json.loads(printed.splitlines()[-1])
    return bits


def test_bits_repeat_and_which_setting_changes_them(
    machine: Machine, report: Report, full_size: Path
) -> None:
    flags = dict(list(FLAGS.items())[:2]) if machine.is_small else FLAGS
    found = {name: _bits(machine, full_size, flag) for name, flag in flags.items()}
    plain = found["torch's own settings"]
    changes: dict[str, Any] = {}
    for name, bits in found.items():
        repeats = all(len(set(hashes)) == 1 for hashes in bits.values())
        changed = [what for what, hashes in bits.items() if hashes[0] != plain[what][0]]
        changes[name] = f"changes {' and '.join(changed) or 'no bit'}" + (
            "" if repeats else ", does not repeat"
        )
    report.add("settings and bits", **changes)
    assert found["the same again"] == plain, "another process, other bits"
    assert all(len(set(hashes)) == 1 for hashes in plain.values()), "the second time, other bits"
