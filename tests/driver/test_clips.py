"""Clips that are cancelled or lost: all others are made, no file is left, `run.json` is true."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from svdpp.comm.packet import FIELDS, Packet
from svdpp.config import ClipRequest, OutputConfig
from svdpp.driver.clips import ClipProgress, OpenClips
from svdpp.driver.jobs import RunManifest
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import (
    ClosedError,
    InputError,
    NotFiniteError,
    OutputError,
    RankError,
    error_to_dict,
)
from svdpp.media.inputs import example_photos
from svdpp.media.video import read_frames
from svdpp.plan.costs import Costs
from svdpp.worker.messages import ActionDone, ClipDone, ClipFailed, Failed, Heartbeat
from svdpp.worker.tensor_files import LatentCheckpoints, saved_steps
from tests.driver.dummies import HANG_SECONDS, clips, config, hashes, plain_hashes
from tests.faults.damage import Damage
from tests.faults.processes import allowing_for_others
from tests.models.builders import small_svd

PHOTO = str(example_photos()[0])


@pytest.fixture
def release(tmp_path: Path) -> Iterator[Path]:
    """The file whose existence lets a held rank go on."""
    path = tmp_path / "release"
    yield path
    path.touch()


def _held(release: Path, rank: int, place: str) -> Damage:
    return Damage("hang", rank, 0, place=place, until=str(release))


@pytest.mark.processes
def test_a_waiting_clip_is_cancelled_at_once(release: Path) -> None:
    with Pipeline(config(3, steps=6), fault=_held(release, 0, "step0")) as pipeline:
        first, second, third = pipeline.submit(clips(0, 1, 2))
        assert second.cancel()
        assert second.cancelled()
        assert second.cancel()  # again changes nothing
        with pytest.raises(CancelledError):
            second.result(0)
        assert not first.done()
        release.touch()
        assert [result.clip for result in pipeline.results()] == [0, 2]
        assert not first.cancel()
        assert first.progress == ClipProgress(6, 6, 2)
        assert not third.cancelled()
        assert pipeline.failures == []
        assert pipeline.run(ClipRequest(seed=3)).clip == 3


@pytest.mark.processes
def test_a_running_clip_ends_when_all_ranks_have_let_go(release: Path) -> None:
    """Its steps take a tenth of a second, so that ranks learn of a cancellation in between."""
    slow = config(3, steps=12, costs=Costs(step_seconds=0.1))
    slow = replace(slow, model=replace(slow.model, dummy_sleeps=True))
    with Pipeline(slow, fault=_held(release, 1, "step5")) as pipeline:
        first = pipeline.submit(ClipRequest(seed=0))
        while first.progress != ClipProgress(5, 12, 1):
            assert not first.done()
        assert first.running()
        assert first.cancel()
        assert not first.done()
        second = pipeline.submit(ClipRequest(seed=1))
        release.touch()
        with pytest.raises(CancelledError):
            first.exception(HANG_SECONDS)
        assert first.progress.steps_done < 12
        assert not first.running()
        assert hashes([second.result(HANG_SECONDS)]) == plain_hashes(12, 1)
        assert [result.clip for result in pipeline.results()] == []


@pytest.mark.processes
def test_a_cancelled_clip_leaves_neither_file_nor_latent_checkpoint(
    release: Path, tmp_path: Path
) -> None:
    out, latents = tmp_path / "out", tmp_path / "latents"
    out.mkdir()
    latents.mkdir()
    request = ClipRequest(
        seed=0,
        image=PHOTO,
        output=OutputConfig(path=str(out / "clip.mp4")),
        latents_key="a" * 64,
    )
    fault = _held(release, 2, "step8")
    with Pipeline(small_svd(3, steps=12), latents_folder=str(latents), fault=fault) as pipeline:
        handle = pipeline.submit(request)
        while not saved_steps(latents, "a" * 64):
            assert not handle.done()
        assert handle.cancel()
        release.touch()
        with pytest.raises(CancelledError):
            handle.result(HANG_SECONDS)
    assert list(out.iterdir()) == list(latents.iterdir()) == []


@pytest.mark.processes
@pytest.mark.parametrize(("victim", "checksum"), [(0, True), (1, False), (2, True)])
def test_latents_that_turn_nan_stop_that_clip_alone(victim: int, checksum: bool) -> None:
    requests = clips(*range(4))
    fault = Damage("nan", victim, 1)
    with Pipeline(config(3, steps=6, checksum=checksum), fault=fault) as pipeline:
        pipeline.submit(requests)
        results = list(pipeline.results())
    assert [result.clip for result in results] == [0, 2, 3]
    (failure,) = pipeline.failures
    assert (failure.clip, failure.request) == (1, requests[1])
    assert isinstance(failure.error, NotFiniteError)
    what = f"the latent is not finite after step {2 * victim}, done by rank {victim}"
    assert failure.error.message == what
    assert hashes(results) == plain_hashes(6, 0, 2, 3)


def _clip(folder: Path, seed: int) -> ClipRequest:
    output = OutputConfig(path=str(folder / f"clip_{seed}.mp4"))
    return ClipRequest(seed=seed, image=PHOTO, output=output)


@pytest.mark.processes
def test_inputs_and_outputs_that_go_wrong_lose_their_own_clip(tmp_path: Path) -> None:
    requests = [_clip(tmp_path, seed) for seed in range(4)]
    requests[1] = replace(requests[1], image=str(tmp_path / "gone.jpg"))
    (tmp_path / "clip_2.mp4").mkdir()  # so that the file cannot be written here
    with Pipeline(small_svd(2, steps=2)) as pipeline:
        pipeline.submit(requests)
        results = list(pipeline.results())
    assert [result.clip for result in results] == [0, 3]
    errors = {failure.clip: type(failure.error) for failure in pipeline.failures}
    assert errors == {1: InputError, 2: OutputError}
    for seed in (0, 3):
        assert len(read_frames(tmp_path / f"clip_{seed}.mp4", "mp4")) == 2
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["clip_0.mp4", "clip_0.mp4.json", "clip_2.mp4", "clip_3.mp4", "clip_3.mp4.json"]


@pytest.mark.timing
@pytest.mark.processes
def test_a_disk_that_hangs_ends_the_run(tmp_path: Path) -> None:
    svd = replace(small_svd(1, steps=2), timeout_seconds=allowing_for_others(4))
    os.mkfifo(tmp_path / "clip0_frames")  # writing to it blocks until there is a reader
    with (
        pytest.raises(RankError, match=r"rank 0 .* has waited for its disk for \d+ s"),
        Pipeline(svd, tensor_folder=str(tmp_path)) as pipeline,
    ):
        pipeline.run([_clip(tmp_path, 0)])


@pytest.mark.processes
@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_header_wrong_in_one_field_ends_the_run_on_both_sides(field: str) -> None:
    said: dict[int, str] = {}
    pipeline = Pipeline(config(steps=6, checksum=True), fault=Damage("header", 0, 1, field))
    pipeline.observe(
        lambda rank, event: (
            said.setdefault(rank, event.error["message"]) if isinstance(event, Failed) else None
        )
    )
    finished = []
    with pytest.raises(RankError) as caught, pipeline:
        pipeline.submit(clips(0, 1, 2))
        finished = [result.clip for result in pipeline.results()]
    assert caught.value.exit_code == 6
    assert "could not receive clip 1 at step 3 from rank 0" in caught.value.message
    assert said[1].startswith("could not receive clip 1 at step 3 from rank 0: ")
    assert finished in ([], [0])
    assert all("could not send clip" in words for rank, words in said.items() if rank == 0)


# --- the manifest --------------------------------------------------------------------------------


def _states(path: Path) -> list[str]:
    return [clip["state"] for clip in json.loads(path.read_text())["clips"]]


def test_the_manifest_follows_each_clip_until_it_is_settled(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    clips = [{"output": f"{name}.mp4"} for name in "abcd"]
    lost = {"output": None, "state": "failed", "error": error_to_dict(InputError("no"))}
    error = error_to_dict(NotFiniteError("not finite"))
    with RunManifest(path, {"model": "demo"}, clips, [lost]) as manifest:
        assert _states(path) == ["failed"] + ["pending"] * 4
        manifest(0, ActionDone(action="ENCODE c0 @0", start=0, end=1, waited=0))
        manifest(1, Heartbeat(action="LOAD c1 @7"))
        manifest(0, Heartbeat(action="ENCODE c2 @0"))
        manifest(1, Heartbeat(action="DECODE c3 @28"))
        manifest(1, ClipDone(clip=0, metadata={"output": "a.mp4", "host": "host1"}))
        manifest(0, ClipFailed(clip=0, error=error))
        manifest(1, ClipFailed(clip=1, error=error))
        manifest(1, ClipDone(clip=1, metadata={"host": "host1"}))
        manifest._write()
        assert _states(path) == ["failed", "done", "failed", "running", "pending"]
    assert _states(path) == ["failed", "done", "failed", "pending", "pending"]
    record = json.loads(path.read_text())
    assert (record["schema_version"], record["model"]) == (1, "demo")
    assert record["clips"][1:3] == [
        {"output": "a.mp4", "state": "done", "host": "host1"},
        {"output": "b.mp4", "state": "failed", "error": error},
    ]


@pytest.mark.parametrize("raised", [None, KeyError])
def test_a_manifest_that_cannot_be_written_ends_no_run_and_hides_no_error(
    tmp_path: Path, raised: type[Exception] | None
) -> None:
    (tmp_path / "run.json").mkdir()
    with pytest.raises(OutputError), RunManifest(tmp_path / "run.json", {}, []):
        pytest.fail("the run had begun")
    path = tmp_path / "later.json"
    with pytest.raises(raised or OutputError), RunManifest(path, {}, [{}]) as manifest:
        path.unlink()
        path.mkdir()
        manifest._next_write = 0.0
        manifest(0, ClipDone(clip=0, metadata={}))
        if raised:
            raise raised("the run's own")


# --- leftover files -----------------------------------------------------------------------------

_DIES_WHILE_WRITING = """
import os, sys
from svdpp.media.output_files import atomic_output
with atomic_output(sys.argv[1], ".part") as temporary:
    temporary.write_text("half")
    os._exit(1)
"""


def _request(seed: int, output: Path | None = None) -> ClipRequest:
    key = hashlib.sha256(bytes([seed])).hexdigest()
    config = None if output is None else OutputConfig(path=str(output))
    return ClipRequest(seed=seed, latents_key=key, output=config)


def _keep(folder: Path, request: ClipRequest) -> None:
    assert request.latents_key is not None
    packet = Packet(request.seed, 7, 0.0, {"latents": torch.zeros(2)})
    LatentCheckpoints(folder, {}).save(request.latents_key, packet)


def _is_kept(folder: Path, request: ClipRequest) -> bool:
    assert request.latents_key is not None
    return bool(saved_steps(folder, request.latents_key))


def _open(folder: Path | None, *requests: ClipRequest) -> OpenClips:
    """The first of them is finished, the second is lost, and the third is on its way."""
    handles = OpenClips(lambda _: None, latents_folder=None if folder is None else str(folder))
    handles.add(requests, [28] * len(requests), for_results=False)
    handles(0, ClipDone(clip=0, metadata={}))
    handles(0, ClipFailed(clip=1, error=error_to_dict(InputError("no"))))
    handles.end(ClosedError("the end"))
    return handles


def test_checkpoints_of_finished_clips_go_however_late_they_come(tmp_path: Path) -> None:
    finished, lost, unfinished = map(_request, range(3))
    for request in (finished, lost, unfinished):
        _keep(tmp_path, request)
    handles = _open(tmp_path, finished, lost, unfinished)
    assert not _is_kept(tmp_path, finished)
    _keep(tmp_path, finished)  # by a rank with a slow disk
    handles.clean_up()
    assert not _is_kept(tmp_path, finished)
    assert _is_kept(tmp_path, lost)
    assert _is_kept(tmp_path, unfinished)


def test_half_written_files_go_from_the_folders_of_all_clips(tmp_path: Path) -> None:
    places = [tmp_path / name / "clip.mp4" for name in ("finished", "lost", "unfinished")]
    for place in places:
        subprocess.run([sys.executable, "-c", _DIES_WHILE_WRITING, str(place)], check=False)
        assert len(list(place.parent.iterdir())) == 1
    _open(None, *(_request(seed, place) for seed, place in enumerate(places))).clean_up()
    assert [list(place.parent.iterdir()) for place in places] == [[], [], []]
