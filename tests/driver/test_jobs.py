"""Checks before a run: existing outputs are kept, replaced or refused; too little memory."""

from __future__ import annotations

import cProfile
import json
import pstats
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from svdpp.config import (
    ClipRequest,
    Encoding,
    Lora,
    ModelConfig,
    OutputConfig,
    ParallelConfig,
    PipelineConfig,
    SvdSampling,
    VideoFormat,
    WanSampling,
)
from svdpp.config.pipeline import parameters_sha256
from svdpp.driver import memory_process, ranks
from svdpp.driver import resolve as memory
from svdpp.driver.clip_metadata import check_clip_metadata, clip_metadata
from svdpp.driver.clip_names import name_jobs
from svdpp.driver.jobs import (
    check_and_name_jobs,
    check_outputs,
    fit_request_to_jobs,
    plan_clips,
)
from svdpp.driver.manifest import RunManifest, open_manifest
from svdpp.driver.output_policy import OutputPolicy
from svdpp.driver.request import PipelineRequest
from svdpp.driver.resolve import check_memory, resolve_config
from svdpp.driver.run_job import RunJob, combine_jobs
from svdpp.driver.run_plan import RunPlan
from svdpp.errors import OutOfMemoryError, RequestError
from svdpp.media import output_files, video
from svdpp.media.images import MediaFile, read_image
from svdpp.media.inputs import ClipInput
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.hashes import cached_sha256
from svdpp.models.memory import estimate
from svdpp.plan.roles import Roles
from svdpp.verification import verify
from svdpp.verification.verify import run_reference
from tests.support.builders import save_tiny_lora
from tests.support.shell import DEMO, PHOTO, Answer, assert_error, svdpp_here
from tests.support.tiny_families import save_tiny_wan

CONFIG = PipelineConfig(
    world_size=2,
    model=ModelConfig(name="demo"),
    sampling=SvdSampling(num_inference_steps=2, height=32, width=32, num_frames=2),
)
CONFIG = replace(CONFIG, sampling=CONFIG.sampling.with_model_defaults(model_frames=14))


@pytest.fixture(scope="module")
def media_file() -> MediaFile:
    return read_image(Path(PHOTO))[1]


def test_ranks_are_started_for_the_largest_clip_all_loras_and_any_number_of_steps() -> None:
    default = SvdSampling(num_inference_steps=4, height=64, width=64, num_frames=2)
    large = replace(default, height=128)
    request = PipelineRequest(model=ModelConfig(name="demo"), sampling=default, device="cpu")
    style = Lora(name="style.safetensors")
    plain = ClipInput(prompt="a cat")
    jobs = [
        RunJob(made_from=plain, seed=0),
        RunJob(made_from=plain, seed=1, sampling=large),
        RunJob(made_from=replace(plain, loras=(style,)), seed=2, sampling=default),
    ]
    fitted = fit_request_to_jobs(request, jobs)
    assert (fitted.sampling, fitted.num_clips) == (large, 3)
    assert fitted.model.clip_loras == (style,)
    assert fitted.resolve()[0].parallel.split == "uniform"
    other = RunJob(made_from=plain, seed=3, sampling=replace(default, num_inference_steps=5))
    assert fit_request_to_jobs(request, [*jobs, other]).resolve()[0].parallel.split == "alternating"


def test_a_run_without_clips_gets_no_names(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="a run makes 1 to 100000 clips, got 0") as caught:
        check_and_name_jobs([], OutputPolicy(folder=tmp_path))
    assert caught.value.details["value"] == 0


def _write_finished_clip(
    media_file: MediaFile, output: OutputConfig, config: PipelineConfig = CONFIG, **more: Any
) -> dict[str, Any]:
    """Write a finished clip's file and metadata as a run would; return the metadata."""
    record = clip_metadata(ClipInput(media_file), 0, output, config, find_checkpoint(config.model))
    record |= {"latents_sha256": "0" * 64, "frames_sha256": "0" * 64, **more}
    Path(output.path).parent.mkdir(exist_ok=True)
    frames = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    record["file_sha256"] = video.write_clip(frames, output, fps=7, metadata=record)
    output_files.write_json(Path(output.json_path), record)
    return record


def _plan(media_file: MediaFile, policy: OutputPolicy, config: PipelineConfig = CONFIG) -> RunPlan:
    jobs = name_jobs(combine_jobs([ClipInput(media_file)], [0]))
    check_outputs(jobs, policy)
    return plan_clips(jobs, policy, config, find_checkpoint(config.model))


@pytest.mark.parametrize(("replicas", "first"), [(1, [2]), (2, [2, 3])])
def test_a_run_does_not_begin_with_an_image_that_all_ranks_wait_for(
    media_file: MediaFile, tmp_path: Path, replicas: int, first: list[int]
) -> None:
    sizes = [6000, 6000, 1000, 1000, 6000, 1000]
    inputs = [
        ClipInput(replace(media_file, path=tmp_path / f"{index}.jpg", width=size, height=4000))
        for index, size in enumerate(sizes)
    ]
    config = replace(CONFIG, parallel=ParallelConfig(data_parallel_size=replicas))
    policy = OutputPolicy(folder=tmp_path)
    jobs = name_jobs(combine_jobs(inputs, [0]))
    plan = plan_clips(jobs, policy, config, find_checkpoint(config.model))
    rest = [index for index in range(len(sizes)) if index not in first]
    names = [Path(request.image or "").stem for request in plan.requests]
    assert names == [str(index) for index in first + rest]
    assert [metadata["input"] for metadata in plan.metadata] == [f"{name}.jpg" for name in names]


def test_clips_with_the_same_loras_follow_each_other(tmp_path: Path) -> None:
    """Clips with the same LoRAs are made one after the other.

    The sets of LoRAs keep the order in which they first occur. A clip's JSON lists the LoRAs of the
    clip, with the hashes of the LoRA files.
    """
    folder = save_tiny_wan(tmp_path / "wan")
    files = [save_tiny_lora(folder, tmp_path / f"{n}.safetensors", seed=n) for n in (1, 2)]
    first, second = (Lora(name=str(file), weight=0.5) for file in files)
    sets = [(first,), (), (second, first), (first,), (), (replace(first, weight=1.5),)]
    inputs = [ClipInput(prompt=f"clip {index}", loras=loras) for index, loras in enumerate(sets)]
    model = ModelConfig(name=str(folder), clip_loras=(first, second))
    sampling = WanSampling(num_inference_steps=4, height=32, width=32, num_frames=5)
    config = PipelineConfig(world_size=2, model=model, sampling=sampling)
    config, checkpoint = resolve_config(config)
    assert checkpoint is not None
    policy = OutputPolicy(folder=tmp_path / "out", latents_folder=tmp_path / "latents")
    plan = plan_clips(name_jobs(combine_jobs(inputs, [0])), policy, config, checkpoint)
    assert [request.prompt for request in plan.requests] == [
        f"clip {index}" for index in (0, 3, 1, 4, 2, 5)
    ]
    hashes = [cached_sha256(file) for file in files]
    found = [
        [(lora["name"], lora["weight"], lora["sha256"]) for lora in each.get("lora", ())]
        for each in plan.metadata
    ]
    one, two = (str(files[0]), 0.5, hashes[0]), (str(files[1]), 0.5, hashes[1])
    assert found == [[one], [one], [], [], [two, one], [(str(files[0]), 1.5, hashes[0])]]
    assert [len(request.loras) for request in plan.requests] == [1, 1, 0, 0, 2, 1]
    assert len({request.latents_key for request in plan.requests}) == len(sets)
    sameness = {json.dumps(each.get("lora")) for each in plan.metadata}
    assert len(sameness) == 4
    assert len({each["parameters_sha256"] for each in plan.metadata}) == len(sets)
    hashes_of_clip = {"latents_sha256": "0" * 64, "frames_sha256": "0" * 64}
    for each in plan.metadata:  # `--resume` reads the metadata in this way
        read = check_clip_metadata({**each, **hashes_of_clip}, "it is none")
        assert parameters_sha256(read) == each["parameters_sha256"]
    of_model = replace(config, model=ModelConfig(name=str(folder), loras=(first,)))
    jobs = name_jobs(combine_jobs([ClipInput(prompt="clip 0")], [0]))
    whole, with_lora = resolve_config(of_model)
    assert with_lora is not None
    (as_model,) = plan_clips(jobs, policy, whole, with_lora).metadata
    assert as_model["parameters_sha256"] == plan.metadata[0]["parameters_sha256"]


@pytest.mark.slow
def test_a_clip_takes_little_work_and_memory_to_plan(media_file: MediaFile, tmp_path: Path) -> None:
    """The plan of a clip takes less than 1 kB and 1500 function calls.

    So 100,000 clips take seconds, and at most 300 MB with the manifest and the messages to the
    ranks.
    """
    inputs, seeds = [ClipInput(media_file)], range(1000)
    policy = OutputPolicy(folder=tmp_path, resume=True, latents_folder=tmp_path / "latents")
    checkpoint = find_checkpoint(CONFIG.model)
    jobs = name_jobs(combine_jobs(inputs, seeds))
    plan_clips(jobs, policy, CONFIG, checkpoint)  # the first call imports modules
    kept = []
    for _ in range(2):  # in one of the two passes, Python's table of interned strings may grow
        tracemalloc.start()
        plan = plan_clips(name_jobs(combine_jobs(inputs, seeds)), policy, CONFIG, checkpoint)
        kept.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert min(kept) / len(plan.requests) < 1000
    with cProfile.Profile() as profile:
        check_outputs(jobs, policy)
        plan_clips(jobs, policy, CONFIG, checkpoint)
        manifest = open_manifest(policy.manifest, CONFIG, plan, [], policy.clip_table)
        manifest._write()
    calls = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    assert calls / len(seeds) < 1500


@pytest.mark.parametrize(("fps", "is_kept"), [(CONFIG.sampling.fps, True), (9, False)])
def test_a_restart_keeps_what_is_as_asked_for(
    media_file: MediaFile, fps: int, is_kept: bool, tmp_path: Path
) -> None:
    before = replace(CONFIG, sampling=replace(CONFIG.sampling, fps=fps))
    _write_finished_clip(media_file, OutputConfig(path=str(tmp_path / "rocket_0.mp4")), before)
    policy = OutputPolicy(folder=tmp_path, overwrite=True)
    assert len(_plan(media_file, policy).requests) == 1
    restarted = _plan(media_file, replace(policy, is_restarted=True))
    assert [len(restarted.skipped), len(restarted.requests)] == [is_kept, not is_kept]
    if not is_kept:
        with pytest.raises(RequestError, match="exists with another value of fps"):
            _plan(media_file, OutputPolicy(folder=tmp_path, is_restarted=True))
    with pytest.raises(RequestError, match="contradict each other"):
        _plan(media_file, replace(policy, resume=True))


def test_a_changed_line_is_made_again_but_no_clip_of_another_model(
    media_file: MediaFile, tmp_path: Path
) -> None:
    output = OutputConfig(path=str(tmp_path / "rocket_0.mp4"))
    _write_finished_clip(media_file, output)
    policy = OutputPolicy(folder=tmp_path, resume=True, replaces_changed=True)
    assert len(_plan(media_file, policy).skipped) == 1
    changed = replace(CONFIG, sampling=replace(CONFIG.sampling, fps=9))
    (clip,) = _plan(media_file, policy, changed).clips
    assert clip.replaces
    for other in ({"num_threads": 2}, {"model": ModelConfig(name="demo", dtype="bf16")}):
        with pytest.raises(RequestError, match=r"exists with another value of (num_threads|dtype)"):
            _plan(media_file, policy, replace(changed, **other))  # type: ignore[arg-type]
    Path(output.json_path).unlink()
    Path(output.path).write_bytes(b"a film of somebody else's")
    with pytest.raises(RequestError, match="is not a clip of svdpp"):
        _plan(media_file, policy, changed)


def test_a_table_of_somebody_elses_is_not_replaced(media_file: MediaFile, tmp_path: Path) -> None:
    """A file clips.jsonl that no run wrote is not replaced. It may be the user's own jobs file."""
    (tmp_path / "clips.jsonl").write_text('{"image": "cat.jpg"}\n')
    for policy in (OutputPolicy(folder=tmp_path), OutputPolicy(folder=tmp_path, resume=True)):
        with pytest.raises(RequestError, match=r"clips\.jsonl' exists, but is not a run's table"):
            _plan(media_file, policy)


def test_a_run_has_a_limit_of_clips(tmp_path: Path) -> None:
    jobs = combine_jobs([ClipInput()] * 2, range(50_001))
    with pytest.raises(RequestError, match="a run makes 1 to 100000 clips, got 100002"):
        check_outputs(jobs, OutputPolicy(folder=tmp_path))


# --- existing files are not replaced without a request ------------------------------------------

FORMATS: list[VideoFormat] = ["mp4", "gif", "webp", "frames"]


def _clip(folder: Path, format: VideoFormat = "mp4") -> OutputConfig:
    suffix = video.FORMAT_SUFFIXES[format]
    return OutputConfig(path=str(folder / f"rocket_0{suffix}"), format=format)


def test_each_format_has_a_json_of_its_own_which_a_killed_run_gets_later(
    media_file: MediaFile, tmp_path: Path
) -> None:
    clips = {kind: _clip(tmp_path, kind) for kind in FORMATS}
    records = {
        kind: _write_finished_clip(media_file, clip, host="host1") for kind, clip in clips.items()
    }
    files = {Path(path) for clip in clips.values() for path in (clip.path, clip.json_path)}
    assert {*tmp_path.iterdir()} == files
    for kind, clip in clips.items():
        Path(clip.json_path).unlink()
        plan = _plan(
            media_file, OutputPolicy(folder=tmp_path, encoding=Encoding(format=kind), resume=True)
        )
        (kept,) = plan.skipped
        assert (kept["file_sha256"], kept["format"]) == (records[kind]["file_sha256"], kind)
        assert json.loads(Path(clip.json_path).read_text()) == kept
        with open_manifest(tmp_path / "run.json", CONFIG, plan, [], tmp_path / "clips.jsonl"):
            pass
        (made,) = json.loads((tmp_path / "run.json").read_text())["clips"]
        assert (made["state"], made["host"]) == ("done", "host1")


@pytest.mark.parametrize("gone", ["json", "file"])
def test_half_a_clip_is_not_replaced_unasked(
    media_file: MediaFile, gone: str, tmp_path: Path
) -> None:
    output = _clip(tmp_path)
    _write_finished_clip(media_file, output)
    Path(output.json_path if gone == "json" else output.path).unlink()
    left = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RequestError, match="1 output exists already, the first is"):
        _plan(media_file, OutputPolicy(folder=tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == left
    other = replace(CONFIG, sampling=replace(CONFIG.sampling, num_inference_steps=4))
    with pytest.raises(
        RequestError, match="exists with another value of num_inference_steps: 2 instead of 4"
    ):
        _plan(media_file, OutputPolicy(folder=tmp_path, resume=True), other)
    assert len(_plan(media_file, OutputPolicy(folder=tmp_path, overwrite=True)).requests) == 1


def test_a_clip_of_somebody_elses_is_not_replaced_by_resume(
    media_file: MediaFile, tmp_path: Path
) -> None:
    frames = np.zeros((2, 32, 32, 3), np.uint8)
    output = _clip(tmp_path)
    for metadata in ({}, {"seed": 1}):
        video.write_clip(frames, output, fps=7, metadata=metadata)
        before = Path(output.path).read_bytes()
        with pytest.raises(RequestError, match="without a JSON, and is not a clip of svdpp"):
            _plan(media_file, OutputPolicy(folder=tmp_path, resume=True))
        assert Path(output.path).read_bytes() == before
    assert len(_plan(media_file, OutputPolicy(folder=tmp_path, overwrite=True)).requests) == 1


def test_a_file_that_was_changed_is_not_replaced_by_resume(
    media_file: MediaFile, tmp_path: Path
) -> None:
    """`--resume` does not replace a changed file, which may be the user's work.

    It replaces a file that cannot be read.
    """
    output, policy = _clip(tmp_path), OutputPolicy(folder=tmp_path, resume=True)
    _write_finished_clip(media_file, output)
    whole = Path(output.path).read_bytes()
    Path(output.path).write_bytes(whole + b"junk")
    with pytest.raises(RequestError, match="is not the file that its JSON describes"):
        _plan(media_file, policy)
    Path(output.path).write_bytes(whole[:-200])
    assert len(_plan(media_file, policy).requests) == 1
    Path(output.path).write_bytes(whole)
    assert len(_plan(media_file, policy).skipped) == 1


def test_a_run_json_of_somebody_elses_is_not_replaced(
    media_file: MediaFile, tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text('{"scripts": {"dev": "next dev"}}')
    for policy in (OutputPolicy(folder=tmp_path), OutputPolicy(folder=tmp_path, resume=True)):
        with pytest.raises(RequestError, match=r"run\.json' exists, but is not a run's manifest"):
            _plan(media_file, policy)
    _plan(media_file, OutputPolicy(folder=tmp_path, overwrite=True))
    with RunManifest(tmp_path / "run.json", {"model": "demo"}, []):
        pass
    _plan(media_file, OutputPolicy(folder=tmp_path))


def test_a_clip_of_version_0_3_is_kept(media_file: MediaFile, tmp_path: Path) -> None:
    """A clip of version 0.3 is kept, although its JSON file has another name and no hash."""
    output = _clip(tmp_path)
    record = {**_write_finished_clip(media_file, output), "schema_version": 1}
    del record["file_sha256"]
    frames = np.zeros((2, 32, 32, 3), np.uint8)
    video.write_clip(frames, output, fps=7, metadata=record)
    Path(output.json_path).rename(tmp_path / "rocket_0.json")
    (kept,) = _plan(media_file, OutputPolicy(folder=tmp_path, resume=True)).skipped
    assert kept["file_sha256"] == video.clip_sha256(Path(output.path))


# --- a run that needs more memory than this machine has is refused before any process starts ----

ALL = Roles(encode=True, denoise=True, decode=True)
ENCODE, DENOISE = Roles(encode=True), Roles(denoise=True)


def _sized(world_size: int = 2, **sampling: int) -> PipelineConfig:
    sizes = {"height": 256, "width": 256, "num_frames": 14, "num_inference_steps": 4, **sampling}
    return PipelineConfig(
        world_size=world_size, model=ModelConfig(name="demo"), sampling=SvdSampling(**sizes)
    )


@pytest.fixture
def one_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**30)
    monkeypatch.setattr(memory, "_DEMO_PIXELS", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("one_gib")
@pytest.mark.parametrize(
    ("config", "ranks", "words"),
    [
        (_sized(), (DENOISE, ALL), "2 CPU ranks need about 2.2 GiB, 1.0 GiB free"),
        (_sized(1), (ALL,), "1 CPU rank needs about 1.9 GiB, 1.0 GiB free"),
        (_sized(height=32, width=32, num_frames=2), (ALL,) * 16, "16 CPU"),
        # The ranks only encode, and an image takes memory too.
        (_sized(height=32, width=32, num_frames=2), (ENCODE, ENCODE), "2 CPU"),
    ],
)
def test_ranks_that_need_more_than_is_free_are_refused(
    config: PipelineConfig, ranks: tuple[Roles, ...], words: str
) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        check_memory(*resolve_config(config), ranks)
    assert words in caught.value.message
    assert "`decode_chunk_size`" in caught.value.hint


@pytest.mark.slow
@pytest.mark.full
def test_an_estimate_changes_nothing_that_the_threads_of_a_process_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A memory estimate changes no setting of torch that other threads share.

    Under torchrun, rank 0 computes in a thread of the process that makes the estimate.
    """

    def refuse(*_: object) -> None:
        raise AssertionError("rank 0 would compute other bits")

    config, checkpoint = resolve_config(
        _sized(1, height=32, width=32, num_frames=2), weights="none"
    )
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    memory_process.estimate_memory.cache_clear()
    with monkeypatch.context() as patch:
        for name, value in (launched | address).items():
            patch.setenv(name, value)
        for name in ("set_default_dtype", "set_num_threads"):
            patch.setattr(torch, name, refuse)
        parts = memory.estimate_parts(config, checkpoint)
    assert checkpoint is not None
    assert parts == estimate(checkpoint, config.model, config.sampling, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "copies"),
    [
        pytest.param(torch.bfloat16, 1, id="mapped"),
        pytest.param(torch.float32, 2, id="converted by each rank"),
    ],
)
def test_ranks_share_an_expert_whose_files_have_the_dtype(
    tmp_path: Path, saved: torch.dtype, copies: int
) -> None:
    folder = save_tiny_wan(tmp_path, boundary_ratio=0.875, dtype=saved, width=8)
    model = ModelConfig(name=str(folder), dtype="bf16")
    sampling = WanSampling(num_inference_steps=4, height=32, width=32, num_frames=5)
    config, checkpoint = resolve_config(
        PipelineConfig(world_size=2, model=model, sampling=sampling)
    )
    assert checkpoint is not None
    low_noise = Roles(denoise=True, experts=frozenset({1}))
    part = estimate(checkpoint, config.model, config.sampling, device="cpu").denoise
    one, two = (
        memory._total_bytes_needed(config, checkpoint, (low_noise,) * count) for count in (1, 2)
    )
    own = memory._RANK_BYTES + part.activation_bytes
    assert one == own + part.weight_bytes
    assert two == 2 * own + copies * part.weight_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("one_gib")
def test_no_process_is_started_and_the_command_ends_with_code_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        pytest.fail("a process was started")

    for module in (ranks, verify):
        monkeypatch.setattr(module, "start_ranks", start)
    with pytest.raises(OutOfMemoryError):
        run_reference(_sized(), [ClipRequest(seed=0, image=PHOTO)], tensor_folder=tmp_path)
    sizes = ("--height", "512", "--width", "512", "--frames", "14")
    answer = svdpp_here("run", PHOTO, *DEMO, *sizes, "--out", str(tmp_path))
    said = [line for line in answer.err.splitlines() if line.startswith(("error", "hint"))]
    ended = Answer(answer.code, answer.out, "\n".join(said))
    assert_error(ended, 4, "out of memory before the run", "GiB free", "smaller")
