"""Real ranks perform the plan's action lists: results, order, failures and error messages."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from svdpp.config import ClipRequest, LatentSpec, ModelConfig, PipelineConfig, SvdSampling
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import RankError
from svdpp.launch import fork_server
from svdpp.models.base import LATENTS
from svdpp.models.dummy import DummyModel
from svdpp.plan.actions import Action, Kind
from svdpp.worker.messages import ActionDone, Event, StepDone, TransferDone
from svdpp.worker.tensor_store import tensor_sha256
from tests.faults.damage import Damage
from tests.faults.processes import allowing_for_others
from tests.faults.stops import InjectedStop

pytestmark = pytest.mark.usefixtures("one_thread")

pytestmark = pytest.mark.processes

SHAPE = (1, 4, 2, 8, 8)


def _config(world_size: int, steps: int = 28, **changes: object) -> PipelineConfig:
    config = PipelineConfig(
        world_size=world_size,
        model=ModelConfig(name="dummy", dummy_latent_shape=SHAPE),
        sampling=SvdSampling(num_inference_steps=steps),
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def _plain_loop(steps: int, seeds: Iterable[int]) -> list[str]:
    spec = LatentSpec(shape=SHAPE, dims="BCFHW")
    model = DummyModel(spec, steps, torch.device("cpu"))
    hashes = []
    with torch.no_grad():
        for seed in seeds:
            latent = model.encode({}, ClipRequest(seed=seed))[LATENTS]
            latent = model.denoise({LATENTS: latent}, 0, steps, lambda *_: None)[LATENTS]
            hashes.append(tensor_sha256(latent))
    return hashes


@pytest.mark.parametrize("world_size", [1, 2, 7, pytest.param(28, marks=pytest.mark.long)])
def test_every_world_gives_the_plain_loops_bits(world_size: int) -> None:
    with Pipeline(_config(world_size)) as pipeline:
        results = pipeline.run([ClipRequest(seed=seed) for seed in range(3)])
    hashes = [result.metadata["latents_sha256"] for result in results]
    assert hashes == _plain_loop(28, range(3))
    assert len(set(hashes)) == 3


def test_processes_perform_exactly_the_planned_lists() -> None:
    seen: list[tuple[int, Event]] = []
    pipeline = Pipeline(_config(4))
    pipeline.observe(lambda rank, event: seen.append((rank, event)))
    with pipeline:
        pipeline.run([ClipRequest(seed=seed) for seed in range(5)])
    for rank, planned in enumerate(
        pipeline.schedule([ClipRequest(seed=seed) for seed in range(5)])
    ):
        events = [event for r, event in seen if r == rank]
        done = [e.action for e in events if isinstance(e, ActionDone)]
        assert done == [action for action in planned if action.is_compute]
        for direction, kind in (("recv", Kind.RECV), ("send", Kind.SEND)):
            transfers = [
                Action(kind, e.clip, e.next_step, e.next_step, e.peer)
                for e in events
                if isinstance(e, TransferDone) and e.direction == direction
            ]
            assert transfers == [action for action in planned if action.kind is kind]
        steps = [(e.clip, e.step) for e in events if isinstance(e, StepDone)]
        assert steps == [
            (action.clip, step)
            for action in planned
            if action.kind is Kind.DENOISE
            for step in range(action.start, action.end)
        ]
    spans = {span.action for span in pipeline.trace.spans}
    assert len(spans) == len(pipeline.trace.spans) == 5 * (4 + 1)


def test_ranks_are_started_once_and_clips_given_as_they_come() -> None:
    with Pipeline(_config(2, steps=4)) as pipeline:
        pipeline.submit([ClipRequest(seed=5)])
        first = next(pipeline.results())
        pipeline.submit([ClipRequest(seed=6), ClipRequest(seed=7)])
        pipeline.submit([ClipRequest(seed=8)])
        rest = list(pipeline.results())
        assert list(pipeline.results()) == []
    assert [first.clip, *(result.clip for result in rest)] == [0, 1, 2, 3]
    hashes = [r.metadata["latents_sha256"] for r in (first, *rest)]
    assert hashes == _plain_loop(4, (5, 6, 7, 8))


def test_a_rank_that_raises_is_named_with_clip_and_step() -> None:
    fault = Damage("raise", 1, 2)
    finished: list[int] = []
    with (
        pytest.raises(RankError) as caught,
        Pipeline(_config(3, steps=6), fault=fault) as pipeline,
    ):
        pipeline.submit([ClipRequest(seed=seed) for seed in range(2)])
        finished += [result.clip for result in pipeline.results()]
        pipeline.submit([ClipRequest(seed=seed) for seed in range(2, 5)])
        finished += [result.clip for result in pipeline.results()]
    error = caught.value
    assert error.exit_code == 6
    assert re.match(r"rank 1 \(cpu of .*\) failed at clip 2, step 2 \(DENOISE c2 2:4\)", str(error))
    assert "an injected fault" in str(error)
    assert "Traceback" in error.trace
    assert "<-- rank 1 failed here" in error.picture.splitlines()[1]
    assert finished == [0, 1]
    _assert_nothing_is_left(pipeline)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.promise), 2])
def test_a_killed_rank_is_named_and_the_others_end(victim: int) -> None:
    fault = Damage("hang", 1, 1)  # so that the run is in progress when the kill arrives
    pipeline = Pipeline(_config(3, steps=6), fault=fault)
    with pytest.raises(RankError) as caught, pipeline:
        pipeline.submit([ClipRequest(seed=seed) for seed in range(3)])
        next(pipeline.results())
        os.kill(_pids(pipeline)[victim], signal.SIGKILL)
        list(pipeline.results())
    assert f"rank {victim} " in str(caught.value)
    assert "was killed by SIGKILL" in str(caught.value)
    assert "memory" in caught.value.hint
    _assert_nothing_is_left(pipeline)


@pytest.mark.timing
def test_a_frozen_rank_is_named_and_not_those_that_wait_for_it() -> None:
    config = _config(3, steps=6, heartbeat_timeout_seconds=allowing_for_others(5))
    pipeline = Pipeline(config, fault=Damage("hang", 0, 1))
    with pytest.raises(RankError) as caught, pipeline:
        pipeline.submit([ClipRequest(seed=seed) for seed in range(3)])
        next(pipeline.results())
        os.kill(_pids(pipeline)[1], signal.SIGSTOP)
        list(pipeline.results())
    assert "rank 1 " in str(caught.value)
    assert "has sent no heartbeat for" in str(caught.value)
    _assert_nothing_is_left(pipeline)


@pytest.mark.timing
def test_a_rank_without_progress_is_named_by_the_timeout() -> None:
    config = _config(3, steps=6, timeout_seconds=allowing_for_others(3))
    pipeline = Pipeline(config, fault=Damage("hang", 1, 1))
    with pytest.raises(RankError) as caught, pipeline:
        pipeline.run([ClipRequest(seed=seed) for seed in range(3)])
    assert re.search(r"rank 1 .* has made no progress .* clip 1, step 2", str(caught.value))
    assert "--timeout" in caught.value.hint


def test_an_interrupt_to_one_rank_is_no_success() -> None:
    pipeline = Pipeline(_config(2, steps=4), fault=Damage("hang", 1, 0))
    with pytest.raises(RankError, match=r"rank 0 .* was killed by SIGINT"), pipeline:
        pipeline.submit([ClipRequest(seed=0)])
        os.kill(_pids(pipeline)[0], signal.SIGINT)
        list(pipeline.results())


def test_spawned_ranks_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """By spawn, as for ranks on CUDA."""
    monkeypatch.setattr(fork_server, "start_method", lambda device: "spawn")  # noqa: ARG005
    with Pipeline(_config(2, steps=4)) as pipeline:
        results = pipeline.run([ClipRequest(seed=1)])
    assert [r.metadata["latents_sha256"] for r in results] == _plain_loop(4, (1,))


def test_a_run_leaves_no_process_and_no_folder_behind() -> None:
    pipeline = Pipeline(_config(2, steps=4))
    with pipeline:
        pipeline.run([ClipRequest(seed=1)])
    _assert_nothing_is_left(pipeline)


def _group(pipeline: Pipeline) -> object:
    return pipeline._supervisor._group  # type: ignore[union-attr]


def _pids(pipeline: Pipeline) -> list[int]:
    pids: list[int] = _group(pipeline).pids  # type: ignore[attr-defined]
    return pids


def _assert_nothing_is_left(pipeline: Pipeline) -> None:
    for pid in _pids(pipeline):
        assert not Path(f"/proc/{pid}").exists() or _is_zombie(pid)
    assert not _group(pipeline)._folder.exists()  # type: ignore[attr-defined]


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_more_work_can_be_given_to_ranks_that_are_busy(tmp_path: Path) -> None:
    """Ranks read further work only after their current work; a pipe holds less than this."""
    gate, pad = tmp_path / "gate", {"pad": "x" * 2**20}
    stop = InjectedStop("hang", 0, 0, place="step0", until=str(gate))
    with Pipeline(_config(2, steps=4), fault=stop) as pipeline:
        pipeline.submit([ClipRequest(seed=1)])
        given = threading.Thread(target=pipeline.submit, args=[[ClipRequest(seed=2)], [pad]])
        given.start()
        given.join(30)
        is_given = not given.is_alive()
        gate.touch()
        results = list(pipeline.results())
    assert is_given
    assert [result.clip for result in results] == [0, 1]
    assert results[1].metadata["pad"] == pad["pad"]
