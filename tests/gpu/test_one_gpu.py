"""Tests on a single GPU with a small model: exactness, links, faults and a lack of memory."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from svdpp.comm import streams
from svdpp.comm.packet import Packet
from svdpp.comm.transport import Transport
from svdpp.config import ParallelConfig
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import OutOfMemoryError, RankError
from svdpp.launch.worker_group import LaunchContext, start_ranks
from svdpp.plan.actions import connect_rounds
from svdpp.verification.verify import verify
from svdpp.worker.tensor_files import checkpoint_path
from tests.gpu.inside_ranks import Fragmented, FullDevice
from tests.gpu.machine import Machine, Report, seconds_until_named
from tests.support.damage import Damage
from tests.support.processes import allowing_for_others, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    "deterministic",
    [
        pytest.param(False, id="torch-settings", marks=pytest.mark.no_rehearsal),
        pytest.param(True, id="deterministic"),
    ],
)
def test_three_ranks_on_one_gpu_are_exact(
    machine: Machine, report: Report, deterministic: bool
) -> None:
    config = machine.config(
        3, parallel=ParallelConfig(split="alternating"), deterministic=deterministic
    )
    name = f"demo model, 3 ranks on {machine.shared_device}, deterministic {deterministic}"
    report.prove(name, config, machine.requests(6))


def test_an_injected_ulp_is_caught_where_it_is(machine: Machine) -> None:
    result = verify(machine.config(3), machine.requests(2), fault=Damage("ulp", 1, 1))
    difference = result.first_difference
    assert difference is not None
    assert (difference.clip, difference.rank, difference.max_ulp) == (1, 1, 1)


def test_a_clip_goes_on_from_a_latent_checkpoint_with_other_ranks(
    machine: Machine, tmp_path: Path
) -> None:
    key = "a" * 64
    (request,) = machine.requests(1)
    config = machine.config(3, checksum=True)
    with Pipeline(config) as pipeline:
        (whole,) = pipeline.run([request])
    kept = replace(request, latents_key=key)
    num_done = 2 * config.sampling.num_inference_steps // 3
    # The second rank writes its latent checkpoint while the third rank denoises, so the fault waits
    # for the file.
    stopped = Damage("raise", 2, 0, until=str(checkpoint_path(tmp_path, key, num_done)))
    pipeline = Pipeline(config, latents_folder=str(tmp_path), fault=stopped)
    with pytest.raises(RankError), pipeline:
        pipeline.run([kept])
    resumed = replace(kept, done_steps=num_done)
    other = machine.config(2, checksum=True)
    with Pipeline(other, latents_folder=str(tmp_path)) as pipeline:
        (result,) = pipeline.run([resumed])
    assert result.metadata["latents_sha256"] == whole.metadata["latents_sha256"]
    assert result.metadata["frames_sha256"] == whole.metadata["frames_sha256"]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_is_gone_is_named(
    machine: Machine, report: Report, number: signal.Signals
) -> None:
    config = machine.config(3, heartbeat_timeout_seconds=allowing_for_others(4))
    seconds = seconds_until_named(Pipeline(config), machine.requests(3), number)
    report.add(f"rank 1 by {number.name}", seconds_until_the_run_ended=seconds)
    assert seconds < allowing_for_others(30)


def test_a_cancelled_clip_leaves_the_others_as_they_are(machine: Machine, tmp_path: Path) -> None:
    release = tmp_path / "release"
    held = Damage("hang", 1, 0, place="step3", until=str(release))
    first, second = machine.requests(2)
    with Pipeline(machine.config(2), fault=held) as pipeline:
        cancelled, after = pipeline.submit([first, second])
        wait_until(lambda: cancelled.progress.steps_done >= 3, 120, "the third step")
        assert cancelled.cancel()
        release.touch()
        with pytest.raises(CancelledError):
            cancelled.result(300)
        beside = after.result(300).metadata
        (alone,) = pipeline.run([second])
    assert beside["latents_sha256"] == alone.metadata["latents_sha256"]
    assert beside["frames_sha256"] == alone.metadata["frames_sha256"]


# --- NCCL between processes on one GPU -----------------------------------------------------------

NUM_PACKETS, PACKET_FLOATS = 50, 475_000  # 1.9 MB, the size of SVD-XT's packet in fp16


def _payload(clip: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(clip)
    return torch.randn(PACKET_FLOATS, generator=generator).to(device)


def _relay_over_nccl(context: LaunchContext, asked: tuple[str, int]) -> None:
    """Forward packets from rank to rank while the GPU computes, and report their hashes.

    A rank must not end before all its packets have arrived. A finished send only means that the
    sent memory may be reused.
    """
    device, rank = torch.device(asked[0]), context.world.rank
    if device.type == "cuda":
        # NCCL refuses two ranks of one host on one GPU, so each rank pretends to be another host.
        os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_IB_DISABLE": "1"}
    streams.use_device(device)
    context.join()
    transport = Transport(rank, device, context.backend, lambda _: None, checksum=True)
    rounds = connect_rounds((r, r + 1) for r in range(context.world.size - 1))
    transport.connect({"clips": rounds})
    matrix = torch.randn(asked[1], asked[1], device=device)
    copies, hashes, begun = streams.SideStream(device), [], time.monotonic()
    for clip in range(NUM_PACKETS):
        if rank:
            packet = transport.post_receive(clip, 1, rank - 1).wait()
        else:
            packet = Packet(clip, 1, 0.0, {"latents": _payload(clip, device)})
        for _ in range(20):
            matrix @ matrix.T
        if rank + 1 < context.world.size:
            transport.send(packet, rank + 1)
        on_host = copies.to_host(packet.tensors["latents"], streams.record_event(device))
        hashes.append(hashlib.sha256(on_host.numpy().tobytes()).hexdigest())
    transport.drain()
    transport.close()
    answer = {"hashes": hashes, "seconds": time.monotonic() - begun}
    context.channel.send(json.dumps(answer).encode())
    assert context.channel.receive(180) == b"all have answered"


def test_packets_cross_nccl_whole_beneath_matmuls(machine: Machine, report: Report) -> None:
    backend = "gloo" if machine.is_rehearsal else "nccl"
    asked = machine.shared_device, 128 if machine.is_small else 2048
    group = start_ranks(
        _relay_over_nccl, asked, world_size=3, backend=backend, device=machine.shared_device
    )
    answers: dict[int, Any] = {}
    try:
        deadline = time.monotonic() + 180
        while len(answers) < 3:
            assert time.monotonic() < deadline, f"only ranks {sorted(answers)} answered"
            answers |= {rank: json.loads(message) for rank, message in group.poll(0.5)}
            for rank, code in group.exited().items():
                assert not code, group.output_tail(rank)
        for rank in answers:
            group.send(rank, b"all have answered")
        begun = time.monotonic()
        assert group.end(30)
        ended = time.monotonic() - begun
    finally:
        group.kill()
    cpu = torch.device("cpu")
    hashes = [hashlib.sha256(_payload(c, cpu).numpy().tobytes()).hexdigest() for c in range(50)]
    assert all(answers[rank]["hashes"] == hashes for rank in range(3))
    report.add(
        f"{NUM_PACKETS} packets of 1.9 MB over {backend}, 3 processes on {machine.shared_device}",
        all_whole=True,
        seconds=answers[2]["seconds"],
        seconds_to_end=ended,
    )


@pytest.mark.no_rehearsal
@pytest.mark.parametrize(
    ("place", "caching", "words"),
    [
        pytest.param("load", True, "image_encoder needs more memory than", id="load"),
        pytest.param("step1", True, "while running a denoising step", id="step"),
        pytest.param("decode", False, "while decoding the frames", id="outside torch's allocator"),
    ],
)
def test_out_of_memory_is_named_with_its_part(
    machine: Machine, place: str, caching: bool, words: str
) -> None:
    full = FullDevice("hang", 0, 0, place=place, caching=caching)
    with (
        pytest.raises(OutOfMemoryError, match=words),
        Pipeline(machine.config(1), fault=full) as pipeline,
    ):
        pipeline.run(machine.requests(1))


@pytest.mark.no_rehearsal
def test_a_clip_made_under_memory_pressure_says_so(machine: Machine) -> None:
    pressed = Fragmented("hang", 0, 0, place="step1")
    with Pipeline(machine.config(1), fault=pressed) as pipeline:
        first, second = pipeline.run(machine.requests(2))
    assert first.metadata["memory_pressure"] is True
    assert first.metadata["exact"] == "memory_pressure"
    assert second.metadata["memory_pressure"] is True, "cuDNN keeps the kernel that it has chosen"
