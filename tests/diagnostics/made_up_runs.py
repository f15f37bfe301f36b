"""Made-up folders of runs: figures of a replayed plan, with one known bottleneck put in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from svdpp.diagnostics.figures import RankFigures, RunFigures, WorkFigures
from svdpp.plan.actions import Kind
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import Span, replay, summarise
from svdpp.plan.layout import Layout

EVEN = Costs(step_seconds=0.1, encode_seconds=0.01, decode_seconds=0.01)


def replayed(
    costs: Costs = EVEN,
    *,
    world_size: int = 2,
    num_steps: int = 10,
    clips: int = 40,
    slow: tuple[float, ...] = (),
    **changes: Any,
) -> RunFigures:
    """The figures of a run that took exactly what the forecast says.

    Args:
        slow: how many times as long as in `costs` each rank's work takes.
    """
    if slow:
        costs = replace(
            costs,
            step_seconds=tuple(costs.step_on(0) * each for each in slow),
            encode_seconds=tuple(costs.encode_on(0) * each for each in slow),
            decode_seconds=tuple(costs.decode_on(0) * each for each in slow),
        )
    layout = Layout(num_steps=num_steps, world_size=world_size, costs=costs)
    spans = replay(layout.schedule(clips), costs)
    summary = summarise(spans, world_size)
    return RunFigures(
        **{
            "ranks": tuple(
                _rank(rank, spans, summary.makespan, costs) for rank in range(world_size)
            ),
            "clips": clips,
            "num_steps": num_steps,
            "makespan": summary.makespan,
            "first_clip": summary.first_clip,
            "seconds_per_clip": summary.seconds_per_clip,
            "bubble": summary.bubble,
            "transfer_seconds": costs.transfer_seconds,
            "forecast_seconds": summary.makespan,
            **changes,
        }
    )


def with_rank(figures: RunFigures, rank: int, **changes: Any) -> RunFigures:
    """`figures` with other values of one rank."""
    ranks = list(figures.ranks)
    ranks[rank] = replace(ranks[rank], **changes)
    return replace(figures, ranks=tuple(ranks))


def delayed(figures: RunFigures, rank: int, seconds: float, **changes: Any) -> RunFigures:
    """`figures` of a run that took longer because one rank waited; the others waited for it."""
    ranks = [
        replace(
            each,
            wall=each.wall + seconds,
            wait=each.wait + seconds,
            **(changes if each.rank == rank else {"packet_wait": each.packet_wait + seconds}),
        )
        for each in figures.ranks
    ]
    return replace(figures, ranks=tuple(ranks), makespan=figures.makespan + seconds)


def leave(folder: Path, figures: RunFigures | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    clips = [
        {"output": "a_0.mp4", "input": "a.jpg", "seed": 0, "state": "done"},
        {"output": "a_1.mp4", "state": "failed", "error": {"message": "a latent is not finite"}},
    ]
    content = {"schema_version": 1, "model": "demo", "clips": clips}
    if figures is not None:
        content["measured"] = figures.to_json()
    path = folder / "run.json"
    path.write_text(json.dumps(content))
    return path


def _rank(rank: int, spans: list[Span], makespan: float, costs: Costs) -> RankFigures:
    own = [span for span in spans if span.rank == rank]
    compute = sum(span.end - span.start for span in own)
    ends = min(span.start for span in own), max(span.end for span in own)
    idle = makespan - ends[1]
    counts = {kind: sum(span.action.kind is kind for span in own) for kind in Kind}
    steps = sum(s.action.end - s.action.start for s in own if s.action.kind is Kind.DENOISE)
    wait = makespan - compute - idle
    return RankFigures(
        rank=rank,
        device="cpu",
        wall=makespan,
        compute=compute,
        wait=wait,
        packet_wait=wait,
        idle=idle,
        step=WorkFigures(count=steps, mean_seconds=costs.step_on(rank)),
        encode=WorkFigures(count=counts[Kind.ENCODE], mean_seconds=costs.encode_on(rank)),
        decode=WorkFigures(count=counts[Kind.DECODE], mean_seconds=costs.decode_on(rank)),
        peak_bytes=2**30,
    )
