"""Real ranks perform the plan's action lists: results, order, and the end of a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import Any

import pytest

from svdpp.driver.pipeline import Pipeline
from svdpp.errors import RankError
from svdpp.launch import fork_server
from svdpp.plan.actions import Action, Kind
from svdpp.plan.costs import Costs
from svdpp.worker.messages import ActionDone, Event, StepDone, TransferDone
from svdpp.worker.tensor_files import tensor_sha256
from tests.driver.dummies import clips, config, pids, plain_latent
from tests.faults.damage import Damage
from tests.faults.processes import is_there

pytestmark = pytest.mark.processes


def _plain_loop(steps: int, seeds: Iterable[int]) -> list[str]:
    return [tensor_sha256(plain_latent(seed, steps, steps)) for seed in seeds]


UNLIKE_RANKS = Costs(step_seconds=(1.0, 3.0, 2.0), encode_seconds=0.5)
REPLICAS = {"world_size": 6, "split": "alternating", "replicas": 2, "decoders": 2}


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
    hashes = [result.metadata["latents_sha256"] for result in results]
    assert hashes == _plain_loop(steps, range(5))
    assert len(set(hashes)) == 5
    _assert_nothing_is_left(pipeline)


def test_spawned_ranks_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """By spawn, as for ranks on CUDA."""
    monkeypatch.setattr(fork_server, "start_method", lambda _: "spawn")
    with Pipeline(config()) as pipeline:
        results = pipeline.run(clips(1))
    assert [result.metadata["latents_sha256"] for result in results] == _plain_loop(4, (1,))


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


def _assert_nothing_is_left(pipeline: Pipeline) -> None:
    assert not any(map(is_there, pids(pipeline)))
    assert not pipeline._entered._group._folder.exists()  # type: ignore[union-attr]
