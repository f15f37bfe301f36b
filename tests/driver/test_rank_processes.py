"""Ranks before and during a run: what they must have in common, and the lists they perform."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.ranks import are_mixed, shared_settings
from svdpp.driver.supervisor import silence_limit
from svdpp.errors import RequestError
from svdpp.launch import group
from svdpp.models.checkpoint import find_checkpoint
from svdpp.plan.actions import Action, Kind
from svdpp.plan.costs import Costs
from svdpp.worker.messages import ActionDone, Event, Started, StepDone, TransferDone
from tests.driver.dummies import clips, config, hashes, pids, plain_hashes
from tests.faults.processes import is_there

UNLIKE_RANKS = Costs(step_seconds=(1.0, 3.0, 2.0), encode_seconds=0.5)
REPLICAS = {"world_size": 6, "split": "alternating", "replicas": 2, "decoders": 2}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("steps", "layout"),
    [
        *((28, {"world_size": world_size}) for world_size in (1, 7)),
        pytest.param(28, {"world_size": 28}, marks=pytest.mark.long),
        (7, {"world_size": 9, "split": "balanced"}),
        (7, {"world_size": 3, "split": "balanced", "costs": UNLIKE_RANKS}),
        (7, {"world_size": 3, "split": "alternating", "costs": UNLIKE_RANKS}),
        (7, {"world_size": 4, "split": "alternating", "decoders": 2}),
        (7, REPLICAS),
        (7, {"world_size": 3, "replicas": 3}),
    ],
    ids=str,
)
def test_every_layout_gives_the_plain_loops_bits_and_leaves_nothing(
    steps: int, layout: dict[str, Any]
) -> None:
    with Pipeline(config(steps=steps, **layout)) as pipeline:
        results = pipeline.run(clips(*range(5)))
    assert hashes(results) == plain_hashes(steps, *range(5))
    assert len(set(hashes(results))) == 5
    assert not any(map(is_there, pids(pipeline)))
    assert not pipeline._entered._group._folder.exists()  # type: ignore[union-attr]


@pytest.mark.processes
def test_spawned_ranks_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """By spawn, as for ranks on CUDA."""
    monkeypatch.setattr(group, "start_method", lambda _: "spawn")
    with Pipeline(config()) as pipeline:
        results = pipeline.run(clips(1))
    assert hashes(results) == plain_hashes(4, 1)


@pytest.mark.processes
@pytest.mark.parametrize("layout", [{"world_size": 4}, REPLICAS], ids=str)
def test_processes_perform_exactly_the_planned_lists(layout: dict[str, Any]) -> None:
    seen: list[tuple[int, Event]] = []
    pipeline = Pipeline(config(steps=28, **layout))
    pipeline.observe(lambda rank, event: seen.append((rank, event)))
    with pipeline:
        pipeline.run(clips(*range(5)))
    for rank, planned in enumerate(pipeline.schedule(clips(*range(5)))):
        events = [event for r, event in seen if r == rank]
        done = [e.action for e in events if isinstance(e, ActionDone)]
        assert done == [action for action in planned if action.is_compute]
        for direction, kind in (("recv", Kind.RECV), ("send", Kind.SEND)):
            transfers = [
                Action(kind, e.clip, e.next_step, e.next_step, e.peer)
                for e in events
                if isinstance(e, TransferDone) and e.direction == direction
            ]
            assert sorted(map(str, transfers)) == sorted(
                str(action) for action in planned if action.kind is kind
            )
        steps = [(e.clip, e.step) for e in events if isinstance(e, StepDone)]
        assert steps == [
            (action.clip, step)
            for action in planned
            if action.kind is Kind.DENOISE
            for step in range(action.start, action.end)
        ]
    spans = {span.action for span in pipeline.trace.spans}
    assert len(spans) == len(pipeline.trace.spans)


# --- what ranks must have in common -------------------------------------------------------------

H100: dict[str, Any] = {"gpu": "H100", "cudnn": 91002, "driver": "580.1"}


def _started(uuid: str | None, conditions: dict[str, Any] = H100) -> Started:
    return Started(device="cuda:0", uuid=uuid, conditions=conditions)


def _check(events: list[Started], *, backend: str = "nccl", allow_mixed: bool = False) -> bool:
    last_first = dict(reversed(list(enumerate(events))))
    return are_mixed(last_first, backend, allowed=allow_mixed)


def test_equal_gpus_are_well() -> None:
    assert not _check([_started("GPU-1"), _started("GPU-2"), _started("GPU-3")])


def test_two_ranks_on_one_gpu_are_refused_under_nccl_alone() -> None:
    twice = [_started("GPU-1"), _started("GPU-2"), _started("GPU-1")]
    with pytest.raises(RequestError, match=r"ranks 0 and 2 have the same GPU \(GPU-1\)"):
        _check(twice)
    assert not _check(twice, backend="gloo")
    assert not _check([_started(None), _started(None)], backend="gloo")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"gpu": "A100"}, "rank 1 has gpu A100, rank 0 has H100"),
        ({"cudnn": 90100}, "rank 1 has cudnn 90100, rank 0 has 91002"),
        ({"driver": "570.2"}, "rank 1 has driver 570.2, rank 0 has 580.1"),
    ],
)
def test_differing_devices_are_refused_by_name(other: dict[str, Any], words: str) -> None:
    events = [_started("GPU-1"), _started("GPU-2", {**H100, **other})]
    with pytest.raises(RequestError, match=words) as caught:
        _check(events)
    assert "--allow-mixed-devices" in caught.value.hint
    assert _check(events, allow_mixed=True)


@pytest.mark.processes
def test_clips_of_mixed_devices_are_not_called_exact() -> None:
    pipeline = Pipeline(config(steps=2, allow_mixed_devices=True))
    conditions: list[dict[str, Any]] = []

    def as_if_mixed(rank: int, event: Event) -> None:  # noqa: ARG001
        if isinstance(event, Started):
            conditions.append(event.conditions)
            pipeline._is_mixed = True

    pipeline.observe(as_if_mixed)
    with pipeline:
        (result,) = pipeline.run([ClipRequest(seed=0)], [{"exact": True}])
    assert result.metadata["exact"] == "unproven"
    assert [each["cpu_capability"] for each in conditions] == [
        result.metadata["conditions"]["cpu_capability"]
    ] * 2


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
        replace(CONFIG, split="alternating"),
        replace(CONFIG, model=ModelConfig(name="demo", dtype="fp16")),
        replace(CONFIG, sampling=replace(CONFIG.sampling, fps=8)),
    ):
        assert shared_settings(other, None) != ours
    assert shared_settings(replace(CONFIG, start_timeout_seconds=5), None) == ours
    assert {"torch", "svdpp", "model", "num threads"} <= ours.keys()
    here = find_checkpoint(CONFIG.model)
    there = replace(here, fingerprint="of other weights")
    assert shared_settings(CONFIG, there) != shared_settings(CONFIG, here)


def test_silence_is_noticed_before_slowness() -> None:
    assert silence_limit(CONFIG) == CONFIG.heartbeat_timeout_seconds
    assert silence_limit(replace(CONFIG, timeout_seconds=5)) == 4
