"""What ranks must have in common: options, versions, and what their bits depend on."""

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
from svdpp.models.checkpoint import find_checkpoint
from svdpp.worker.messages import Event, Started
from tests.driver.dummies import config as dummy

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
    pipeline = Pipeline(dummy(steps=2, allow_mixed_devices=True))
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
