"""Real ranks perform the plan's action lists: results, order, and the end of a rank."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from svdpp.config import ClipRequest, LatentSpec
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import RankError
from svdpp.launch import fork_server
from svdpp.models.base import LATENTS
from svdpp.models.dummy import DummyModel
from svdpp.plan.actions import Action, Kind
from svdpp.worker.messages import ActionDone, Event, StepDone, TransferDone
from svdpp.worker.tensor_store import tensor_sha256
from tests.driver.dummies import clips, config, pids
from tests.faults.damage import Damage
from tests.faults.processes import allowing_for_others, is_there
from tests.faults.stops import InjectedStop

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("one_thread")]


def _plain_loop(steps: int, seeds: Iterable[int]) -> list[str]:
    model = DummyModel(LatentSpec(shape=(1, 4, 2, 8, 8), dims="BCFHW"), steps, torch.device("cpu"))
    hashes = []
    with torch.no_grad():
        for seed in seeds:
            latent = model.encode({}, ClipRequest(seed=seed))[LATENTS]
            latent = model.denoise({LATENTS: latent}, 0, steps, lambda *_: None)[LATENTS]
            hashes.append(tensor_sha256(latent))
    return hashes


@pytest.mark.parametrize(
    ("world_size", "start_method"),
    [
        *((1, "forkserver"), (2, "spawn"), (7, "forkserver")),  # spawn, as for ranks on CUDA
        pytest.param(28, "forkserver", marks=pytest.mark.long),
    ],
)
def test_every_world_gives_the_plain_loops_bits_and_leaves_nothing(
    world_size: int, start_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "start_method", lambda _: start_method)
    with Pipeline(config(world_size, steps=28)) as pipeline:
        results = pipeline.run(clips(0, 1, 2))
    hashes = [result.metadata["latents_sha256"] for result in results]
    assert hashes == _plain_loop(28, range(3))
    assert len(set(hashes)) == 3
    _assert_nothing_is_left(pipeline)


def test_processes_perform_exactly_the_planned_lists() -> None:
    seen: list[tuple[int, Event]] = []
    pipeline = Pipeline(config(4, steps=28))
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
    with Pipeline(config()) as pipeline:
        pipeline.submit(clips(5))
        first = next(pipeline.results())
        pipeline.submit(clips(6, 7))
        pipeline.submit(clips(8))
        rest = list(pipeline.results())
        assert list(pipeline.results()) == []
    assert [first.clip, *(result.clip for result in rest)] == [0, 1, 2, 3]
    hashes = [r.metadata["latents_sha256"] for r in (first, *rest)]
    assert hashes == _plain_loop(4, (5, 6, 7, 8))


@pytest.mark.promise
def test_a_killed_rank_is_named_and_the_others_end() -> None:
    pipeline = Pipeline(config(3, steps=6), fault=Damage("hang", 1, 1))
    with pytest.raises(RankError, match=r"rank 1 .* was killed by SIGKILL") as caught, pipeline:
        pipeline.submit(clips(0, 1, 2))
        next(pipeline.results())
        os.kill(pids(pipeline)[1], signal.SIGKILL)
        list(pipeline.results())
    assert "memory" in caught.value.hint
    _assert_nothing_is_left(pipeline)


@pytest.mark.timing
def test_a_rank_without_progress_is_named_by_the_timeout() -> None:
    slow = config(3, steps=6, timeout_seconds=allowing_for_others(3))
    pipeline = Pipeline(slow, fault=Damage("hang", 1, 1))
    with pytest.raises(RankError) as caught, pipeline:
        pipeline.run(clips(0, 1, 2))
    assert re.search(r"rank 1 .* has made no progress .* clip 1, step 2", str(caught.value))
    assert "--timeout" in caught.value.hint


def _assert_nothing_is_left(pipeline: Pipeline) -> None:
    assert not any(map(is_there, pids(pipeline)))
    assert not pipeline._supervisor._group._folder.exists()  # type: ignore[union-attr, attr-defined]


def test_more_work_can_be_given_to_ranks_that_are_busy(tmp_path: Path) -> None:
    """Ranks read further work only after their current work; a pipe holds less than this."""
    gate, pad = tmp_path / "gate", {"pad": "x" * 2**20}
    stop = InjectedStop("hang", 0, 0, place="step0", until=str(gate))
    with Pipeline(config(), fault=stop) as pipeline:
        pipeline.submit(clips(1))
        given = threading.Thread(target=pipeline.submit, args=[clips(2), [pad]])
        given.start()
        given.join(30)
        is_given = not given.is_alive()
        gate.touch()
        results = list(pipeline.results())
    assert is_given
    assert [result.clip for result in results] == [0, 1]
    assert results[1].metadata["pad"] == pad["pad"]
