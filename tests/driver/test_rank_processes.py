"""Real ranks: their actions, the bits of every family, and conditions that must be equal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.comm.packet import Packet
from svdpp.config import ClipRequest, ModelConfig, ParallelConfig, PipelineConfig, SvdSampling
from svdpp.driver import ranks
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.ranks import have_mixed_conditions, shared_settings
from svdpp.driver.resolve import resolve_config
from svdpp.errors import RequestError
from svdpp.launch import worker_group
from svdpp.media.inputs import read_input
from svdpp.media.video import frames_sha256
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine.factory import load_engine_model
from svdpp.plan.actions import Action, Kind
from svdpp.plan.costs import CostModel
from svdpp.plan.roles import Roles
from svdpp.worker.device import conditions_of
from svdpp.worker.messages import ActionDone, Event, Started, StepDone, TransferDone
from svdpp.worker.tensor_files import LatentCheckpoints, audio_hashes, tensor_sha256
from tests.support.dummies import clips, config, hashes, pids, plain_hashes
from tests.support.processes import is_there
from tests.support.range_checks import nothing, whole_clip
from tests.support.shell import PHOTO
from tests.support.tiny_families import CASES, chosen, save_tiny

UNLIKE_RANKS = CostModel(step_seconds=(1.0, 3.0, 2.0), encode_seconds=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "layout"),
    [
        *((28, {"world_size": world_size}) for world_size in (1, 7)),
        pytest.param(28, {"world_size": 28}, marks=pytest.mark.full),
        (7, {"world_size": 9, "split": "balanced"}),
        (7, {"world_size": 3, "split": "balanced", "costs": UNLIKE_RANKS}),
        (7, {"world_size": 3, "split": "alternating", "costs": UNLIKE_RANKS}),
        (7, {"world_size": 4, "split": "alternating", "decoders": 2}),
        (7, {"world_size": 6, "split": "alternating", "replicas": 2, "decoders": 2}),
        (7, {"world_size": 3, "replicas": 3}),
    ],
    ids=str,
)
def test_every_layout_performs_the_planned_lists_to_the_plain_loops_bits_and_leaves_nothing(
    steps: int, layout: dict[str, Any]
) -> None:
    events: dict[int, list[Event]] = {}
    pipeline = Pipeline(config(steps=steps, **layout))
    pipeline.observe(lambda rank, event: events.setdefault(rank, []).append(event))
    with pipeline:
        results = pipeline.run(clips(*range(5)))
    assert hashes(results) == plain_hashes(steps, *range(5))
    assert len(set(hashes(results))) == 5
    for rank, planned in enumerate(pipeline.schedule(clips(*range(5)))):
        _assert_performed(planned, events[rank])
    assert not any(map(is_there, pids(pipeline)))
    assert not pipeline._running_supervisor._group._folder.exists()  # type: ignore[union-attr]


def _assert_performed(planned: Sequence[Action], events: Sequence[Event]) -> None:
    done = [event.action for event in events if isinstance(event, ActionDone)]
    assert done == [action for action in planned if action.is_compute]
    for direction, kind in (("recv", Kind.RECV), ("send", Kind.SEND)):
        transfers = [
            Action(kind, event.clip, event.next_step, event.next_step, event.peer)
            for event in events
            if isinstance(event, TransferDone) and event.direction == direction
        ]
        expected = [action for action in planned if action.kind is kind]
        assert sorted(map(str, transfers)) == sorted(map(str, expected))
    steps = [(event.clip, event.step) for event in events if isinstance(event, StepDone)]
    assert steps == [
        (action.clip, step)
        for action in planned
        if action.kind is Kind.DENOISE
        for step in range(action.start, action.end)
    ]


@pytest.mark.slow
def test_spawned_ranks_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are started by spawn, as on CUDA, give the same bits."""
    monkeypatch.setattr(worker_group, "start_method", lambda _: "spawn")
    with Pipeline(config()) as pipeline:
        results = pipeline.run(clips(1))
    assert hashes(results) == plain_hashes(4, 1)


# --- every family gives the bits of diffusers' unmodified pipelines, also for a resumed clip ----


def _row(name: str, folder: Path) -> tuple[PipelineConfig, ClipRequest]:
    case = CASES[name]
    save_tiny(case.family, folder, image=case.image, **case.changes)
    dtype: Any = case.dtype
    model = ModelConfig(name=str(folder), family=case.family, dtype=dtype)
    is_svd = case.family == "svd"
    image = PHOTO if case.image or is_svd else None
    videos = dict.fromkeys(case.config().videos, image or "")
    request = ClipRequest(seed=3, prompt=None if is_svd else "the sea", image=image, videos=videos)
    config = PipelineConfig(
        world_size=3, model=model, sampling=case.config(), parallel=ParallelConfig(split="balanced")
    )
    return config, request


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", chosen(("svd", "wan-animate")))
def test_three_ranks_make_a_clip_and_resume_that_of_another_run(tmp_path: Path, name: str) -> None:
    config, request = _row(name, tmp_path / "model")
    config, checkpoint = resolve_config(config)
    assert checkpoint is not None
    sampling = config.sampling
    image = read_input(request, sampling)
    latents, frames, audio = whole_clip(config.model, sampling, request, image)
    roles = Roles(encode=True, denoise=True, decode=False)
    model = load_engine_model(checkpoint, config.model, sampling, "cpu", roles)
    prepared = {} if image is None else model.prepare(image)
    tensors = model.denoise(model.encode(prepared, request), 0, 1, nothing)
    key = "ab" * 32
    kept = LatentCheckpoints(tmp_path, conditions_of(config, checkpoint, "cpu"))
    kept.save(key, Packet(0, 1, 0.0, tensors))
    resumed = replace(request, latents_key=key, done_steps=1)
    with Pipeline(config, latents_folder=str(tmp_path)) as pipeline:
        for result in pipeline.run([request, resumed]):
            assert result.metadata["latents_sha256"] == tensor_sha256(latents[-1])
            assert result.metadata["frames_sha256"] == frames_sha256(frames)
            assert result.metadata.items() >= audio_hashes(audio).items()


# --- conditions that must be equal on all ranks -------------------------------------------------

H100: dict[str, Any] = {"gpu": "H100", "cudnn": 91002, "driver": "580.1"}


def _check(
    uuids: Sequence[str | None], backend: str, other: dict[str, Any], *, allowed: bool
) -> bool:
    conditions = [H100] * (len(uuids) - 1) + [{**H100, **other}]
    started = [
        Started(device="cuda:0", uuid=uuid, conditions=own)
        for uuid, own in zip(uuids, conditions, strict=True)
    ]
    return have_mixed_conditions(dict(reversed(list(enumerate(started)))), backend, allowed=allowed)


@pytest.mark.parametrize(
    ("uuids", "backend", "other", "words"),
    [
        (["GPU-1", "GPU-2", "GPU-3"], "nccl", {}, None),
        (["GPU-1", "GPU-2", "GPU-1"], "gloo", {}, None),
        ([None, None], "gloo", {}, None),
        (["GPU-1", "GPU-2", "GPU-1"], "nccl", {}, r"ranks 0 and 2 have the same GPU \(GPU-1\)"),
        (["GPU-1", "GPU-2"], "nccl", {"gpu": "A100"}, "rank 1 has gpu A100, rank 0 has H100"),
        (["GPU-1", "GPU-2"], "nccl", {"cudnn": 90100}, "has cudnn 90100, rank 0 has 91002"),
    ],
)
def test_ranks_that_share_a_gpu_or_differ_are_refused_by_name(
    uuids: list[str | None], backend: str, other: dict[str, Any], words: str | None
) -> None:
    if words is None:
        assert not _check(uuids, backend, other, allowed=False)
        return
    with pytest.raises(RequestError, match=words) as caught:
        _check(uuids, backend, other, allowed=False)
    if other:
        assert "`allow_mixed_devices`" in caught.value.hint
        assert _check(uuids, backend, other, allowed=True)


@pytest.mark.slow
def test_clips_of_mixed_devices_are_not_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "have_mixed_conditions", lambda *_, allowed: allowed)
    with Pipeline(config(steps=2, allow_mixed_devices=True)) as pipeline:
        (result,) = pipeline.run(clips(0), [{"exact": True}])
    assert result.metadata["exact"] == "unproven"
    assert "cpu_capability" in result.metadata["conditions"]


CONFIG = PipelineConfig(
    world_size=2,
    model=ModelConfig(name="demo"),
    sampling=SvdSampling(num_inference_steps=2, height=32, width=32, num_frames=2),
)


def test_terms_are_what_bits_and_lists_depend_on() -> None:
    ours = shared_settings(CONFIG, None)
    assert json.loads(json.dumps(ours)) == ours
    for other in (
        replace(CONFIG, num_threads=2),
        replace(CONFIG, parallel=ParallelConfig(split="alternating")),
        replace(CONFIG, model=ModelConfig(name="demo", dtype="fp16")),
        replace(CONFIG, sampling=replace(CONFIG.sampling, fps=8)),
    ):
        assert shared_settings(other, None) != ours
    assert shared_settings(replace(CONFIG, start_timeout_seconds=5), None) == ours
    assert {"torch", "svdpp", "model", "num threads"} <= ours.keys()
    here = find_checkpoint(CONFIG.model)
    there = replace(here, fingerprint="of other weights")
    assert shared_settings(CONFIG, there) != shared_settings(CONFIG, here)
