"""The report names the one known bottleneck of each made-up run, and what would help."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.config.limits import read_costs
from svdpp.diagnostics.figures import RunFigures, WorkFigures, figures_of
from svdpp.diagnostics.report import Diagnosis, read_report
from svdpp.errors import InputError, RequestError
from svdpp.plan.large_forecast import forecast_layout
from svdpp.plan.layout import Layout
from tests.cli.shell import parsed
from tests.diagnostics.made_up_runs import EVEN, delayed, leave, replayed, with_rank

_DECODE = replace(EVEN, decode_seconds=1.0)


def _transfers() -> RunFigures:
    figures = replace(delayed(replayed(), 1, 30.0), transfer_seconds=0.8)
    return with_rank(figures, 1, transfer=30.0, wait=0.5, packet_wait=30.5)


def _few_steps_left() -> RunFigures:
    """A split by wrong costs: rank 0 does three steps in four."""
    figures = replayed()
    wall = figures.makespan * 1.5
    figures = with_rank(
        figures, 0, compute=wall, wait=0.0, packet_wait=0.0, idle=0.0,
        step=WorkFigures(count=300, mean_seconds=0.1),
    )  # fmt: skip
    return with_rank(
        figures, 1, compute=wall / 3, packet_wait=wall * 2 / 3,
        step=WorkFigures(count=100, mean_seconds=0.1),
    )  # fmt: skip


def _disk() -> RunFigures:
    figures = replace(delayed(replayed(), 1, 20.0, writer_wait=20.0), write_tail=2.0)
    return with_rank(figures, 1, write=WorkFigures(count=40, mean_seconds=1.2))


_FOUR: dict[str, Any] = {"world_size": 4, "num_steps": 12}
#: What each made-up run suffers from, the rank that limits it, and words of the report.
BOTTLENECKS: dict[str, tuple[RunFigures, int | None, str]] = {
    "balanced": (replayed(), None, "no rank: each computes"),
    "balanced: one": (replayed(world_size=1), None, "its one rank, which computes 100% of the"),
    "decode": (replayed(_DECODE), 1, "its decodes take 67% of its work"),
    "encode": (replayed(replace(EVEN, encode_seconds=0.8)), 0, "its encodes"),
    "steps": (_few_steps_left(), 0, "it does 300 steps, the others 100"),
    "slow_device": (
        *(replayed(slow=(1.0, 1.8, 1.0, 1.0), **_FOUR), 1),
        "a step takes 0.18 s, on the others 0.1 s",
    ),
    "transfers": (_transfers(), 1, "waits 30.0 s while packets arrive, 0.8 s each"),
    "images": (delayed(replayed(), 0, 15.0, image_wait=15.0), 0, "waits 15.0 s for images"),
    "disk": (_disk(), 1, "rank 1 writes a clip in 1.2 s"),
    "few_clips": (replayed(clips=2, **_FOUR), None, "2 clips cannot fill 4 ranks"),
    "few_clips: one": (replayed(clips=1, **_FOUR), None, "1 clip cannot fill 4 ranks"),
}


def _diagnosis(folder: Path, figures: RunFigures) -> Diagnosis:
    found = read_report(leave(folder, figures)).diagnosis
    assert found is not None
    return found


@pytest.mark.parametrize("kind", BOTTLENECKS)
def test_the_known_bottleneck_comes_first_and_its_advice_holds(kind: str, tmp_path: Path) -> None:
    figures, rank, words = BOTTLENECKS[kind]
    diagnosis = _diagnosis(tmp_path, figures)
    first, advice = diagnosis.findings[0], diagnosis.advice
    assert (first.kind, first.rank) == (kind.partition(":")[0], rank)
    assert words in diagnosis.headline == first.text
    lines = diagnosis.lines
    assert len(lines) == (0 if figures.clips <= figures.world_size else 3 if advice else 1)
    assert all(len(line) <= 80 for line in lines[:2])
    assert len(f"limited by: {first.text}") <= 80
    if advice is None:
        return
    asked = parsed(f"svdpp run photo.jpg {advice.options}")["options"]
    names = {name: getattr(asked, name) for name in ("split", "replicas", "decoders")}
    counts = {"num_steps": figures.num_steps, "world_size": figures.world_size}
    layout = Layout(**counts, **names, costs=figures.costs)
    assert (layout.split, layout.replicas) != ("uniform", 1), "the layout of each made-up run"
    assert figures.forecast_seconds is not None
    times = figures.forecast_seconds / forecast_layout(layout, figures.clips).makespan
    assert times == pytest.approx(advice.times_as_fast, rel=0.05), advice


def test_advice_names_the_layout_that_the_forecast_prefers(tmp_path: Path) -> None:
    best = _diagnosis(tmp_path, replayed(_DECODE)).advice
    assert best is not None
    assert best.times_as_fast == pytest.approx(1.5, abs=0.1)
    assert best.options == "--split uniform --replicas 2 --decoders 1"
    assert "if each device holds the whole model" in best.text


def test_a_slow_rank_gets_costs_of_its_own(tmp_path: Path) -> None:
    path = leave(tmp_path, replayed(slow=(1.0, 2.0)))
    costs = read_costs(path)
    assert costs.step_seconds == (0.1, 0.2)
    assert costs.encode_seconds == (0.01, 0.02)
    even = read_costs(leave(tmp_path / "even", replayed()))
    assert (even.step_seconds, even.decode_seconds) == (0.1, 0.01)
    with pytest.raises(RequestError, match="the run has measured no costs"):
        read_costs(leave(tmp_path / "none", None))


def test_the_json_holds_what_the_report_says(tmp_path: Path) -> None:
    figures = replace(replayed(), forecast_seconds=replayed().makespan / 2)
    content = json.loads(json.dumps(read_report(leave(tmp_path, figures)).to_json()))
    assert content["clips"] == {"done": 1, "failed": 1}
    assert content["lost"] == [{"output": "a_1.mp4", "why": "a latent is not finite"}]
    assert content["findings"][0]["kind"] == "balanced"
    assert content["forecast_error"] == pytest.approx(1.0)
    content = read_report(leave(tmp_path, None)).to_json()
    assert (content["clips"]["done"], content["findings"]) == (1, [])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"makespan": 0.0}, "makespan must be above 0"),
        ({"makespan": float("nan")}, "makespan must be a finite number"),
        ({"ranks": []}, "ranks"),
        ({"ranks": "many"}, "ranks"),
        ({"schema_version": 2}, "of another version"),
        ({"clips": 0}, "clips must be 1 or more"),
        (None, "damaged"),
    ],
)
def test_damaged_figures_are_refused(changes: dict[str, Any] | None, words: str) -> None:
    measured: Any = [] if changes is None else {**replayed().to_json(), **changes}
    with pytest.raises(InputError, match=words):
        figures_of({"measured": measured}, "'run.json'")


def test_figures_read_back_are_the_same_and_small() -> None:
    figures = replayed(clips=100, world_size=8, num_steps=16)
    content = json.dumps({"measured": figures.to_json()})
    found = figures_of(json.loads(content), "")
    assert found is not None
    assert found.to_json() == figures.to_json()
    assert len(content) < 100_000
