"""Clips that are cancelled, lost or resumed: all other clips are made, and no file is left."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from svdpp.comm.packet import FIELDS, Packet
from svdpp.config import ClipRequest, ModelConfig, OutputConfig, PipelineConfig, SvdSampling
from svdpp.driver.clips import ClipProgress, ClipTracker
from svdpp.driver.manifest import RunManifest, find_missing_outputs
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import (
    ClosedError,
    InputError,
    NotFiniteError,
    OutputError,
    RankError,
    error_to_dict,
)
from svdpp.media.inputs import example_images
from svdpp.media.video import read_frames
from svdpp.plan.actions import Kind
from svdpp.plan.costs import CostModel
from svdpp.worker import device
from svdpp.worker.messages import (
    ActionDone,
    CheckpointLost,
    ClipDone,
    ClipFailed,
    Event,
    Failed,
    Heartbeat,
)
from svdpp.worker.tensor_files import LatentCheckpoints, list_checkpoints, saved_steps
from tests.support.builders import small_svd
from tests.support.damage import Damage
from tests.support.dummies import (
    HANG_SECONDS,
    clips,
    config,
    hashes,
    pids,
    plain_hashes,
    plain_latent,
)
from tests.support.processes import allowing_for_others, wait_until
from tests.support.small_disk import small_disk

PHOTO = str(example_images()[0])


@pytest.fixture
def release(tmp_path: Path) -> Iterator[Path]:
    """Path of a file that a test creates to let a hanging rank continue."""
    path = tmp_path / "release"
    yield path
    path.touch()


def _held(release: Path, rank: int, place: str) -> Damage:
    return Damage("hang", rank, 0, place=place, until=str(release))


@pytest.mark.slow
def test_a_waiting_clip_is_cancelled_at_once(release: Path) -> None:
    with Pipeline(config(3, steps=6), fault=_held(release, 0, "step0")) as pipeline:
        first, second, third = pipeline.submit(clips(0, 1, 2))
        assert second.cancel()
        assert second.cancelled()
        assert second.cancel()  # a second call changes nothing
        with pytest.raises(CancelledError):
            second.result(0)
        assert not first.done()
        release.touch()
        assert [result.clip for result in pipeline.results()] == [0, 2]
        assert not first.cancel()
        assert first.progress == ClipProgress(6, 6, 2)
        assert not third.cancelled()
        assert pipeline.failures == []
        assert pipeline.run(clips(3))[0].clip == 3


@pytest.mark.slow
def test_a_running_clip_ends_when_all_ranks_have_let_go_and_leaves_no_file(
    release: Path, tmp_path: Path
) -> None:
    """A running clip ends when all ranks have stopped it, and leaves no file.

    A step takes a tenth of a second, so that ranks get the cancellation between two steps.
    """
    out, latents = tmp_path / "out", tmp_path / "latents"
    out.mkdir()
    latents.mkdir()
    slow = config(3, steps=12, costs=CostModel(step_seconds=0.1))
    slow = replace(slow, model=replace(slow.model, dummy_sleeps=True))
    output = OutputConfig(path=str(out / "clip.mp4"))
    fault = _held(release, 1, "step5")
    with Pipeline(slow, latents_folder=str(latents), fault=fault) as pipeline:
        first = pipeline.submit(ClipRequest(seed=0, output=output, latents_key="a" * 64))
        while first.progress != ClipProgress(5, 12, 1) or not saved_steps(latents, "a" * 64):
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
        assert list(pipeline.results()) == []
    assert list(out.iterdir()) == list(latents.iterdir()) == []


@pytest.mark.slow
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
    what = f"the latent is not finite after step {2 * victim} (computed by rank {victim})"
    assert failure.error.message == what
    assert hashes(results) == plain_hashes(6, 0, 2, 3)


def _clip(folder: Path, seed: int) -> ClipRequest:
    output = OutputConfig(path=str(folder / f"clip_{seed}.mp4"))
    return ClipRequest(seed=seed, image=PHOTO, output=output)


@pytest.mark.slow
def test_inputs_and_outputs_that_go_wrong_lose_their_own_clip(tmp_path: Path) -> None:
    requests = [_clip(tmp_path, seed) for seed in range(4)]
    requests[1] = replace(requests[1], image=str(tmp_path / "gone.jpg"))
    (tmp_path / "clip_2.mp4").mkdir()  # a folder, so that the clip's file cannot be written
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
@pytest.mark.slow
def test_a_disk_that_hangs_ends_the_run(tmp_path: Path) -> None:
    svd = replace(small_svd(1, steps=2), timeout_seconds=allowing_for_others(4))
    os.mkfifo(tmp_path / "clip0_frames")  # a write to the pipe blocks, because nobody reads it
    with (
        pytest.raises(RankError, match=r"rank 0 .* has waited for its disk for \d+ s"),
        Pipeline(svd, tensor_folder=str(tmp_path)) as pipeline,
    ):
        pipeline.run([_clip(tmp_path, 0)])


@pytest.mark.slow
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


# --- latent checkpoints --------------------------------------------------------------------------

KEYS = ["a" * 64, "b" * 64]


def _requests(folder: Path) -> list[ClipRequest]:
    """Return requests that resume two clips from their latest latent checkpoints in `folder`."""
    return [
        ClipRequest(seed=seed, latents_key=key, done_steps=max([0, *saved_steps(folder, key)]))
        for seed, key in enumerate(KEYS)
    ]


@pytest.fixture(scope="module")
def uninterrupted() -> list[str]:
    return plain_hashes(28, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_after_a_kill_at_every_hand_over(
    victim: int, tmp_path: Path, uninterrupted: list[str]
) -> None:
    """After a kill of a rank, the second clip resumes from the packet sent to that rank.

    The rank `victim` is killed when it has the packet. Pipelines with other numbers of ranks then
    complete the clip.
    """
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
        pipeline.run(_requests(tmp_path))
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    # There may be an older checkpoint too, because it was written late or is not removed yet.
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
    """Folder to which no latent checkpoint can be written, because it is full or not writable."""
    if request.param == "not writable":
        yield Path("/proc/svdpp")
        return
    with small_disk(tmp_path / "disk", "size=16k") as disk:
        (disk / "filler").write_bytes(bytes(2**14))
        yield disk


@pytest.mark.slow
def test_clips_go_on_if_their_latents_cannot_be_kept(
    no_space: Path, uninterrupted: list[str]
) -> None:
    lost: list[CheckpointLost] = []
    pipeline = Pipeline(config(4, steps=28), latents_folder=str(no_space))
    pipeline.observe(
        lambda _, event: lost.append(event) if isinstance(event, CheckpointLost) else None
    )
    with pipeline:
        results = pipeline.run(_requests(no_space))
    assert hashes(results) == uninterrupted
    assert len(lost) == 3, "once by each rank that sends"
    assert {event.error["type"] for event in lost} == {"OutputError"}
    assert all(repr(str(no_space)) in event.error["message"] for event in lost)
    assert not no_space.is_dir() or [path.name for path in no_space.iterdir()] == ["filler"]


@pytest.mark.slow
def test_a_resumed_clip_repeats_no_step_and_tells_its_work_from_its_pause(
    tmp_path: Path, uninterrupted: list[str]
) -> None:
    """A resumed clip repeats no step.

    Its compute seconds count the steps before the pause, but not the pause. Its wall time counts
    both.
    """
    an_hour_ago, latent = time.monotonic() - 3600, {"latents": plain_latent(0, 14, 28)}
    packet = Packet(0, 14, an_hour_ago, latent, compute_seconds=700.0)
    conditions = device.conditions_of(config(1), None, "cpu")
    LatentCheckpoints(tmp_path, conditions).save(KEYS[0], packet)
    resumed, fresh = _requests(tmp_path)
    pipeline = Pipeline(config(4, steps=28), latents_folder=str(tmp_path))
    steps: set[tuple[int, str]] = set()
    pipeline.observe(
        lambda rank, event: (
            steps.add((rank, str(event.action))) if isinstance(event, ActionDone) else None
        )
    )
    begun = time.time()
    with pipeline:
        results = pipeline.run([resumed, fresh])
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


def test_a_later_checkpoint_replaces_an_earlier_one_and_none_outlives_a_finished_clip(
    tmp_path: Path,
) -> None:
    def keep(clip: int, step: int) -> None:
        packet = Packet(clip, step, 0.0, {"latents": torch.zeros(2)})
        LatentCheckpoints(tmp_path, {}).save(str(clip) * 64, packet)

    handles = ClipTracker(lambda _: None, latents_folder=str(tmp_path))
    requests = [ClipRequest(seed=clip, latents_key=str(clip) * 64) for clip in range(3)]
    handles.add(requests, [28] * 3, for_results=False)
    for clip in range(3):
        keep(clip, 7)
        keep(clip, 14)
    handles(0, ClipDone(clip=0, metadata={}))
    handles(0, ClipFailed(clip=1, error=error_to_dict(InputError("no"))))
    handles.end(ClosedError("the end"))
    of_others = {("1" * 64, 14), ("2" * 64, 14)}
    handles._files.submit(lambda: None).result(60)  # wait until the earlier removals are done
    assert list_checkpoints(tmp_path) == of_others
    keep(0, 21)  # a rank with a slow disk may write so late
    handles.clean_up()
    assert list_checkpoints(tmp_path) == of_others


def _set_clock_back(rank: int) -> None:  # noqa: ARG001
    """Make the clock of a rank's process go back by an hour each time it is read."""
    hours = itertools.count()
    time.time = lambda: 1.8e9 - 3600.0 * next(hours)


@pytest.mark.slow
def test_a_clock_that_is_set_back_makes_no_duration_negative() -> None:
    with Pipeline(config(2), fault=_set_clock_back) as pipeline:
        (result,) = pipeline.run(clips(0))
    metadata = result.metadata
    assert 0 <= metadata["compute_seconds"] <= metadata["wall_seconds"] + 0.01 < 600


def test_a_checkpoint_from_a_clock_that_was_set_back_began_before_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packet = Packet(3, 7, time.monotonic() - 100.0, {"latents": torch.zeros(2, 3)})
    LatentCheckpoints(tmp_path, {}).save(KEYS[0], packet)
    load = partial(LatentCheckpoints(tmp_path, {}).load, KEYS[0], 3, 7, torch.device("cpu"), "")
    assert time.monotonic() - load().begun_at == pytest.approx(100.0, abs=20)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 7200)
    assert load().begun_at <= time.monotonic()


@pytest.mark.parametrize(
    ("damage", "here", "words"),
    [
        (lambda data: data[:-5], "a CPU", "cannot be read"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "a CPU", "is damaged"),
        (lambda _: b"<html>", "a CPU", "cannot be read"),
        (lambda _: None, "a CPU", "is missing"),
        (lambda data: data, "another", "another cpu_capability: a CPU, now another"),
    ],
)
def test_a_checkpoint_that_is_damaged_or_does_not_fit_is_refused(
    damage: Callable[[bytes], bytes | None], here: str, words: str, tmp_path: Path
) -> None:
    packet = Packet(3, 7, 12.5, {"latents": torch.arange(6.0).view(2, 3)})
    LatentCheckpoints(tmp_path, {"cpu_capability": "a CPU"}).save(KEYS[0], packet)
    (path,) = tmp_path.iterdir()
    damaged = damage(path.read_bytes())
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    checkpoints = LatentCheckpoints(tmp_path, {"cpu_capability": here})
    with pytest.raises(InputError, match=words) as caught:
        checkpoints.load(KEYS[0], 9, 7, torch.device("cpu"), "'cat_7.mp4'")
    error = caught.value
    assert error.message.startswith("'cat_7.mp4' cannot go on after step 7: the latent checkpoint ")
    assert KEYS[0] not in error.message + error.hint, "nobody can tell a clip by 64 digits"
    assert error.details.items() >= {"clip": 9, "step": 7}.items()
    pattern = error.hint.removeprefix("rm ").removesuffix("*: the clip then starts again")
    assert str(path).startswith(pattern)


def test_a_checkpoint_made_with_other_weights_is_refused(tmp_path: Path) -> None:
    """A latent checkpoint made with other weights is refused.

    The hashes of whole files find every change; the fingerprint of a folder reads only samples.
    """
    packet = Packet(0, 7, 0.0, {"latents": torch.zeros(2)})
    LatentCheckpoints(tmp_path, {}, {"unet/a": "1", "vae/b": "2"}).save(KEYS[0], packet)
    for weights, fits in (
        ({"unet/a": "1", "vae/b": "2"}, True),
        ({"unet/a": "1"}, True),  # a host without the VAE
        ({"unet/a": "1", "vae/b": "3"}, False),
    ):
        checkpoints = LatentCheckpoints(tmp_path, {}, weights)
        refused = pytest.raises(InputError, match="another vae/b: 2, now 3")
        with contextlib.nullcontext() if fits else refused:
            checkpoints.load(KEYS[0], 0, 7, torch.device("cpu"))


def test_ranks_that_keep_latents_know_the_hash_of_all_weights(tmp_path: Path) -> None:
    sampling = SvdSampling(num_frames=2, height=64, width=64, num_inference_steps=2)
    demo = PipelineConfig(world_size=2, model=ModelConfig(name="demo"), sampling=sampling)
    pipeline = Pipeline(demo, latents_folder=str(tmp_path))
    pipeline._hash_weights()
    assert pipeline.checkpoint is not None
    assert pipeline._setup.weights == pipeline.checkpoint.file_hashes()
    assert {name.partition("/")[0] for name in pipeline._setup.weights} >= {"unet", "vae"}


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
        manifest(1, Heartbeat(action="LOAD_CHECKPOINT c1 @7"))
        manifest(0, Heartbeat(action="ENCODE c2 @0"))
        manifest(1, Heartbeat(action="DECODE c3 @28"))
        manifest(1, ClipDone(clip=0, metadata={"output": "a.mp4", "host": "host1"}))
        manifest(0, ClipFailed(clip=0, error=error))
        manifest(1, ClipFailed(clip=1, error=error))
        manifest(1, ClipDone(clip=1, metadata={"host": "host1"}))
        manifest._write_at_once()
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


def test_a_run_that_ends_before_it_has_begun_leaves_the_manifest_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for earlier in (None, "of an earlier run"):
        if earlier:
            path.write_text(earlier)
        with pytest.raises(RankError), RunManifest(path, {}, [{}]) as manifest:
            manifest(0, Heartbeat(phase="loading the model"))
            raise RankError("never started")
        assert (path.read_text() if path.exists() else None) == earlier
    with pytest.raises(RankError), RunManifest(path, {}, [{}]) as manifest:
        manifest(0, Heartbeat(action="ENCODE c0 @0"))
        raise RankError("died")
    assert _states(path) == ["pending"]


def test_finished_clips_that_somebody_removed_are_found(tmp_path: Path) -> None:
    clips = [{"output": f"{name}.mp4"} for name in "abc"]
    for name in ("a.mp4", "a.mp4.json", "b.mp4"):
        (tmp_path / name).touch()
    gone = find_missing_outputs(tmp_path, clips)
    assert list(gone) == ["b.mp4", "c.mp4"]
    assert "b.mp4.json' is gone" in gone["b.mp4"].message
    assert list(find_missing_outputs(tmp_path / "removed", clips)) == ["a.mp4", "b.mp4", "c.mp4"]
    path = tmp_path / "run.json"
    with RunManifest(path, {}, clips) as manifest:
        for clip in range(3):
            manifest(0, ClipDone(clip=clip, metadata={}))
        for output, error in gone.items():
            manifest.mark_lost(output, error)
    assert _states(path) == ["done", "failed", "failed"]


def test_a_folder_that_does_not_respond_does_not_stop_the_supervision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that does not respond does not block the thread that supervises the ranks.

    That thread passes all events to the manifest and to the clips, whose files may be in the
    folder.
    """
    responds = threading.Event()
    monkeypatch.setattr("svdpp.driver.clips.remove_checkpoints", lambda *_: responds.wait())
    handles = ClipTracker(lambda _: None, latents_folder=str(tmp_path))
    request = ClipRequest(seed=0, latents_key=KEYS[0])
    (handle,) = handles.add([request], [28], for_results=False)
    with RunManifest(tmp_path / "run.json", {}, [{}]) as manifest:
        monkeypatch.setattr("svdpp.media.output_files.write_text", lambda *_: responds.wait())
        manifest._next_write = 0.0
        begun = time.monotonic()
        for observer in (manifest, handles):
            observer(0, Heartbeat(action="ENCODE c0 @0"))
            observer(0, ClipDone(clip=0, metadata={}))
        assert handle.done()
        assert time.monotonic() - begun < allowing_for_others(5)
        responds.set()
