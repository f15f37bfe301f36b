"""An interrupted clip resumes from its last latent checkpoint, on any ranks, to the same bits."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from svdpp.comm.packet import Packet
from svdpp.config import ClipRequest
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import InputError, RankError
from svdpp.plan.actions import Kind
from svdpp.worker import device
from svdpp.worker.messages import ActionDone, CheckpointLost, Event
from svdpp.worker.tensor_files import LatentCheckpoints, prune, saved_steps
from tests.driver.dummies import (
    HANG_SECONDS,
    config,
    hashes,
    pids,
    plain_hashes,
    plain_latent,
)
from tests.faults.damage import Damage
from tests.faults.processes import wait_until
from tests.small_disk import small_disk

KEYS = [hashlib.sha256(bytes([clip])).hexdigest() for clip in range(2)]
CONDITIONS = {"cpu_capability": "here"}


def _requests(folder: Path | None = None) -> list[ClipRequest]:
    requests = [ClipRequest(seed=clip, latents_key=KEYS[clip]) for clip in range(2)]
    if folder is None:
        return requests
    return [
        replace(request, done_steps=max(saved_steps(folder, key), default=0))
        for request, key in zip(requests, KEYS, strict=True)
    ]


@pytest.fixture(scope="module")
def uninterrupted() -> list[str]:
    return plain_hashes(28, 0, 1)


@pytest.mark.processes
@pytest.mark.parametrize("victim", [pytest.param(1, marks=pytest.mark.promise), 2, 3])
def test_after_a_kill_at_every_hand_over(
    victim: int, tmp_path: Path, uninterrupted: list[str]
) -> None:
    """The victim hangs with the second clip's packet, and is killed there."""
    handed_over = victim * 7
    pipeline = Pipeline(
        config(4, steps=28), latents_folder=str(tmp_path), fault=Damage("hang", victim, 1)
    )

    def kill_when_kept(rank: int, event: Event) -> None:
        if rank == victim - 1 and isinstance(event, ActionDone):
            action = event.action
            if (action.kind, action.clip) == (Kind.DENOISE, 1):
                is_kept = lambda: handed_over in saved_steps(tmp_path, KEYS[1])  # noqa: E731
                wait_until(is_kept, HANG_SECONDS, f"no checkpoint {handed_over}")
                os.kill(pids(pipeline)[victim], signal.SIGKILL)

    pipeline.observe(kill_when_kept)
    with pytest.raises(RankError, match=f"rank {victim} .* was killed by SIGKILL"), pipeline:
        pipeline.run(_requests())
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    # The file of the rank before may be written later than this one, or not be removed yet.
    assert max(saved_steps(tmp_path, KEYS[1])) == handed_over
    for world_size in (4, 7, 2, 1):
        for path, content in kept.items():
            path.write_bytes(content)
        requests = _requests(tmp_path)
        assert requests[1].done_steps == handed_over
        with Pipeline(config(world_size, steps=28), latents_folder=str(tmp_path)) as pipeline:
            assert hashes(pipeline.run(requests)) == uninterrupted
        assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=["full", "not writable"])
def no_space(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder in which no file of a packet's size can be written."""
    if request.param == "not writable":
        yield Path("/proc/svdpp")
        return
    with small_disk(tmp_path / "disk", "size=16k") as disk:
        (disk / "filler").write_bytes(bytes(2**14))
        yield disk


@pytest.mark.processes
def test_clips_go_on_if_their_latents_cannot_be_kept(
    no_space: Path, uninterrupted: list[str]
) -> None:
    lost: list[CheckpointLost] = []
    pipeline = Pipeline(config(4, steps=28), latents_folder=str(no_space))
    pipeline.observe(
        lambda _, event: lost.append(event) if isinstance(event, CheckpointLost) else None
    )
    with pipeline:
        results = pipeline.run(_requests())
    assert hashes(results) == uninterrupted
    assert len(lost) == 3, "once by each rank that sends"
    assert {event.error["type"] for event in lost} == {"OutputError"}
    assert all(repr(str(no_space)) in event.error["message"] for event in lost)
    assert not no_space.is_dir() or [path.name for path in no_space.iterdir()] == ["filler"]


@pytest.mark.processes
def test_a_resumed_clip_repeats_no_step_and_tells_its_work_from_its_pause(
    tmp_path: Path, uninterrupted: list[str]
) -> None:
    """Steps before the pause count as compute, the pause does not; the wall time has both."""
    an_hour_ago, latent = time.time() - 3600, {"latents": plain_latent(0, 14, 28)}
    packet = Packet(0, 14, an_hour_ago, latent, compute_seconds=700.0)
    LatentCheckpoints(tmp_path, _here()).save(KEYS[0], packet)
    resumed, fresh = _requests()
    pipeline = Pipeline(config(4, steps=28), latents_folder=str(tmp_path))
    steps: set[tuple[int, str]] = set()
    pipeline.observe(
        lambda rank, event: (
            steps.add((rank, str(event.action))) if isinstance(event, ActionDone) else None
        )
    )
    begun = time.time()
    with pipeline:
        results = pipeline.run([replace(resumed, done_steps=14), fresh])
    taken = time.time() - begun
    assert hashes(results) == uninterrupted
    repeated = {(rank, f"DENOISE c0 {rank * 7}:{rank * 7 + 7}") for rank in range(4)} & steps
    assert repeated == {(2, "DENOISE c0 14:21"), (3, "DENOISE c0 21:28")}
    old, new = (result.metadata for result in results)
    assert (old["resumed_from_step"], new["resumed_from_step"]) == (14, 0)
    assert 3600 <= old["wall_seconds"] <= 3600 + taken + 0.1
    assert 700 < old["compute_seconds"] <= 700 + taken
    assert 0 < new["compute_seconds"] <= new["wall_seconds"] + 0.01
    assert new["wall_seconds"] <= taken


def _here() -> dict[str, Any]:
    return device.conditions_of(config(1), None, "cpu")


# --- the files ----------------------------------------------------------------------------------


def _packet(step: int = 7) -> Packet:
    tensors = {"latents": torch.randn(2, 3), "ids": torch.ones(1).bfloat16()}
    return Packet(3, step, 12.5, tensors, compute_seconds=4.25)


def _load(checkpoints: LatentCheckpoints, step: int = 7) -> Packet:
    return checkpoints.load(KEYS[0], 9, step, torch.device("cpu"))


def test_a_packet_comes_back_as_another_runs_clip(tmp_path: Path) -> None:
    checkpoints = LatentCheckpoints(tmp_path / "new", CONDITIONS)
    packet = _packet()
    checkpoints.save(KEYS[0], packet)
    back = _load(checkpoints)
    assert (back.clip, back.next_step, back.begun_at, back.tombstone) == (9, 7, 12.5, False)
    assert back.compute_seconds == 4.25
    assert back.tensors.keys() == packet.tensors.keys()
    assert all(torch.equal(back.tensors[name], packet.tensors[name]) for name in packet.tensors)


def test_a_later_hand_over_takes_the_place_of_the_earlier(tmp_path: Path) -> None:
    checkpoints = LatentCheckpoints(tmp_path, CONDITIONS)
    for key in KEYS:
        checkpoints.save(key, _packet(7))
    checkpoints.save(KEYS[0], _packet(14))
    assert (saved_steps(tmp_path, KEYS[0]), saved_steps(tmp_path, KEYS[1])) == ([14], [7])
    prune(tmp_path, KEYS[0])
    assert (saved_steps(tmp_path, KEYS[0]), saved_steps(tmp_path, KEYS[1])) == ([], [7])
    assert saved_steps(tmp_path / "absent", KEYS[0]) == []


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    LatentCheckpoints(tmp_path, {"cpu_capability": "elsewhere"}).save(KEYS[0], _packet())
    with pytest.raises(InputError, match=r"conditions are .*elsewhere.* not .*here") as caught:
        _load(LatentCheckpoints(tmp_path, CONDITIONS))
    assert "delete" in caught.value.hint


@pytest.mark.parametrize("damage", ["cut", "bit", "text", "gone"])
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    checkpoints = LatentCheckpoints(tmp_path, CONDITIONS)
    checkpoints.save(KEYS[0], _packet())
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(data[:-5])
    elif damage == "bit":
        data[-1] ^= 1
        path.write_bytes(data)
    elif damage == "text":
        path.write_text("<html>")
    else:
        path.unlink()
    with pytest.raises(InputError, match="the latent checkpoint"):
        _load(checkpoints)
