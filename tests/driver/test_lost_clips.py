"""An error of one clip is reported for that clip, and every other clip is made."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from svdpp.comm.packet import FIELDS
from svdpp.config import ClipRequest, OutputConfig, PipelineConfig
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.run_manifest import RunManifest
from svdpp.errors import InputError, NotFiniteError, OutputError, RankError, error_to_dict
from svdpp.media.inputs import example_photos
from svdpp.media.video import read_frames
from svdpp.worker.messages import ActionDone, ClipDone, ClipFailed, Failed, Heartbeat
from tests.driver.dummies import clips
from tests.driver.dummies import config as dummy
from tests.faults.damage import Damage
from tests.faults.processes import allowing_for_others
from tests.models.builders import small_svd


def _demo(folder: Path, num_clips: int) -> tuple[PipelineConfig, list[ClipRequest]]:
    requests = [
        ClipRequest(
            seed=seed,
            image=str(example_photos()[0]),
            output=OutputConfig(path=str(folder / f"clip_{seed}.mp4")),
        )
        for seed in range(num_clips)
    ]
    return small_svd(2, steps=2), requests


@pytest.mark.processes
@pytest.mark.parametrize(("victim", "checksum"), [(0, True), (1, False), (2, True)])
def test_latents_that_turn_nan_stop_that_clip_alone(victim: int, checksum: bool) -> None:
    requests = clips(*range(4))
    fault = Damage("nan", victim, 1)
    with Pipeline(dummy(3, steps=6, checksum=checksum), fault=fault) as pipeline:
        pipeline.submit(requests)
        results = list(pipeline.results())
    assert [result.clip for result in results] == [0, 2, 3]
    (failure,) = pipeline.failures
    assert (failure.clip, failure.request) == (1, requests[1])
    assert isinstance(failure.error, NotFiniteError)
    what = f"the latent is not finite after step {2 * victim}, done by rank {victim}"
    assert failure.error.message == what
    with Pipeline(dummy(3, steps=6)) as pipeline:
        others = pipeline.run([requests[clip] for clip in (0, 2, 3)])
    assert [r.metadata["latents_sha256"] for r in results] == [
        r.metadata["latents_sha256"] for r in others
    ]


@pytest.mark.processes
def test_inputs_and_outputs_that_go_wrong_lose_their_own_clip(tmp_path: Path) -> None:
    config, requests = _demo(tmp_path, 4)
    gone = ClipRequest(seed=1, image=str(tmp_path / "gone.jpg"), output=requests[1].output)
    (tmp_path / "clip_2.mp4").mkdir()  # so that the file cannot be written here
    with Pipeline(config) as pipeline:
        pipeline.submit([requests[0], gone, *requests[2:]])
        results = list(pipeline.results())
    assert [result.clip for result in results] == [0, 3]
    assert {failure.clip: type(failure.error) for failure in pipeline.failures} == {
        1: InputError,
        2: OutputError,
    }
    for seed in (0, 3):
        assert len(read_frames(tmp_path / f"clip_{seed}.mp4", "mp4")) == 2
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["clip_0.mp4", "clip_0.mp4.json", "clip_2.mp4", "clip_3.mp4", "clip_3.mp4.json"]


@pytest.mark.timing
@pytest.mark.processes
def test_a_disk_that_hangs_ends_the_run(tmp_path: Path) -> None:
    config, requests = _demo(tmp_path, 1)
    config = replace(config, world_size=1, timeout_seconds=allowing_for_others(4))
    os.mkfifo(tmp_path / "clip0_frames")  # writing to it blocks until there is a reader
    with (
        pytest.raises(RankError, match=r"rank 0 .* has waited for its disk for \d+ s"),
        Pipeline(config, tensor_folder=str(tmp_path)) as pipeline,
    ):
        pipeline.run(requests)


@pytest.mark.processes
@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_header_wrong_in_one_field_ends_the_run_on_both_sides(field: str) -> None:
    said: dict[int, str] = {}
    pipeline = Pipeline(dummy(steps=6, checksum=True), fault=Damage("header", 0, 1, field))
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
