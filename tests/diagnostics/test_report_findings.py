"""The report names the one known bottleneck of each made-up run, and what would help."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.config.files import read_costs
from svdpp.diagnostics.figures import RunFigures, WorkFigures, figures_of
from svdpp.diagnostics.findings import KINDS, Finding, overrun
from svdpp.diagnostics.report import Diagnosis, read_report
from svdpp.errors import InputError, RequestError
from svdpp.plan.large_forecast import forecast_layout
from svdpp.plan.layout import Layout
from tests.cli.test_help import parsed
from tests.diagnostics.made_up_runs import EVEN, delayed, leave, replayed, with_rank

_DECODE = replace(EVEN, decode_seconds=1.0)


def _transfers() -> RunFigures:
    figures = delayed(replayed(), 1, 30.0)
    return with_rank(
        replace(figures, transfer_seconds=0.8),
        1,
        transfer=30.0,
        wait=0.5,
        packet_wait=30.5,
    )


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
    figures = delayed(replayed(), 1, 20.0, writer_wait=20.0)
    return with_rank(
        replace(figures, write_tail=2.0), 1, write=WorkFigures(count=40, mean_seconds=1.2)
    )


#: What each made-up run suffers from, the rank that limits it, and words of the report.
BOTTLENECKS: dict[str, tuple[RunFigures, int | None, str]] = {
    "balanced": (replayed(), None, "no rank limits the others"),
    "decode": (replayed(_DECODE), 1,
               "its decodes take 67% of its work, so it works 1.5 s a clip"),
    "encode": (replayed(replace(EVEN, encode_seconds=0.8)), 0, "its encodes"),
    "steps": (_few_steps_left(), 0, "it does 300 steps, the others 100"),
    "slow_device": (replayed(slow=(1.0, 1.8, 1.0, 1.0), world_size=4, num_steps=12),
                    1, "a step takes 0.18 s on it, and 0.1 s on the others: its device is slower"),
    "transfers": (_transfers(), 1, "waits 30.0 s while packets arrive, 0.8 s each"),
    "images": (delayed(replayed(), 0, 15.0, photograph_wait=15.0), 0,
               "waits 15.0 s for images"),
    "disk": (_disk(), 1, "writing a clip takes rank 1 1.2 s"),
    "few_clips": (replayed(clips=2, world_size=4, num_steps=12), None,
                  "2 clips are few for 4 ranks"),
    "few_clips: one": (replayed(clips=1, world_size=4, num_steps=12), None,
                       "1 clip is not enough for 4 ranks"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BOTTLENECKS)
def test_the_known_bottleneck_comes_first(kind: str, tmp_path: Path) -> None:
    figures, rank, words = BOTTLENECKS[kind]

    report = _diagnosis(tmp_path, figures)

    first = report.findings[0]
    assert (first.kind, first.rank) == (kind.partition(":")[0], rank)
    assert words in first.text
    assert report.headline.startswith(first.text)
    if report.advice is not None:
        parsed(report.advice.command)


def test_advice_names_the_layout_that_the_forecast_prefers(tmp_path: Path) -> None:
    report = _diagnosis(tmp_path, replayed(_DECODE))

    best = report.advice
    assert best is not None
    assert best.times_as_fast == pytest.approx(1.5, abs=0.1)
    asked = parsed(best.command)
    wanted = asked["options"].layout  # --from reads the run's other options
    assert (wanted.layout, wanted.split, wanted.replicas) == ("pipeline", "uniform", 2)
    assert asked["output"].out == Path("out-again")
    assert best.text in report.headline
    assert best.note == "each device needs room for the whole model"


def test_a_slow_rank_gets_costs_of_its_own(tmp_path: Path) -> None:
    path = leave(tmp_path, replayed(slow=(1.0, 2.0)))
    costs = read_costs(path)
    assert costs.step_seconds == (0.1, 0.2)
    assert costs.encode_seconds == (0.01, 0.02)
    even = read_costs(leave(tmp_path / "even", replayed()))
    assert (even.step_seconds, even.decode_seconds) == (0.1, 0.01)
    with pytest.raises(RequestError, match="the run has measured no costs"):
        read_costs(leave(tmp_path / "none", None))


def test_the_forecasts_error_is_a_share_of_the_forecast(tmp_path: Path) -> None:
    figures = replace(replayed(), forecast_seconds=replayed().makespan / 2)
    assert _diagnosis(tmp_path, figures).forecast_error == pytest.approx(1.0)


def test_the_json_holds_what_the_report_says(tmp_path: Path) -> None:
    content = json.loads(json.dumps(read_report(leave(tmp_path, replayed())).to_json()))
    assert content["clips"] == {"done": 1, "failed": 1}
    assert content["lost"] == [{"output": "a_1.mp4", "why": "a latent is not finite"}]
    assert content["findings"][0]["kind"] == "balanced"
    content = read_report(leave(tmp_path, None)).to_json()
    assert (content["clips"]["done"], content["findings"]) == (1, [])


def test_an_overrun_is_explained_by_what_limits_the_ranks() -> None:
    figures = replace(delayed(replayed(), 0, 15.0, photograph_wait=15.0), makespan=10.0)
    assert overrun(figures, 8.4) == ""
    assert overrun(figures, 8.3) == (
        "the run took 10.00 s, 1.2 times the forecast: rank 0 waits 15.0 s for images: they are "
        "read more slowly than the ranks make clips"
    )


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("makespan",), 0.0, "makespan must be above 0"),
        (("makespan",), float("nan"), "makespan must be a finite number"),
        (("ranks",), [], "ranks"),
        (("ranks",), "many", "ranks"),
        (("schema_version",), 2, "of another version"),
        (("clips",), 0, "clips must be 1 or more"),
        ((), [], "damaged"),
    ],
)
def test_damaged_figures_are_refused(place: tuple[str, ...], value: Any, words: str) -> None:
    measured: Any = replayed().to_json()
    if place:
        measured[place[0]] = value
    else:
        measured = value
    with pytest.raises(InputError, match=words):
        figures_of({"measured": measured}, "'run.json'")


def test_figures_read_back_are_the_same_and_small() -> None:
    figures = replayed(clips=100, world_size=8, num_steps=16)
    content = json.dumps({"measured": figures.to_json()})
    found = figures_of(json.loads(content), "")
    assert found is not None
    assert found.to_json() == figures.to_json()
    assert len(content) < 100_000


def _diagnosis(folder: Path, figures: RunFigures) -> Diagnosis:
    found = read_report(leave(folder, figures)).diagnosis
    assert found is not None
    return found


@pytest.mark.parametrize("kind", BOTTLENECKS)
def test_the_advice_changes_something_and_its_forecast_holds(kind: str, tmp_path: Path) -> None:
    figures, _, _ = BOTTLENECKS[kind]
    advice = _diagnosis(tmp_path, figures).advice
    if advice is None:
        return
    asked = parsed(advice.command)["options"].layout
    layout = Layout(
        num_steps=figures.num_steps,
        world_size=figures.world_size,
        split=asked.split,
        replicas=asked.replicas,
        decoders=asked.decoders,
        costs=figures.costs,
    )
    assert (layout.split, layout.replicas) != ("uniform", 1), "the layout of each made-up run"
    assert figures.forecast_seconds is not None
    times = figures.forecast_seconds / forecast_layout(layout, figures.clips).makespan
    assert times == pytest.approx(advice.times_as_fast, rel=0.05), advice


@pytest.mark.parametrize("kind", KINDS)
def test_each_limit_fits_on_a_line(kind: str, tmp_path: Path) -> None:
    found = Finding(kind=kind, rank=1023, lost_seconds=86400.0, text="")
    line, *_ = replace(_diagnosis(tmp_path, replayed()), findings=(found,)).lines
    assert line.startswith("limited by: ")
    assert len(line) <= 80


@pytest.mark.parametrize("kind", BOTTLENECKS)
def test_the_end_of_a_run_is_two_lines_that_fit(kind: str, tmp_path: Path) -> None:
    diagnosis = _diagnosis(tmp_path, BOTTLENECKS[kind][0])
    lines = diagnosis.lines
    assert bool(lines) == (diagnosis.figures.clips > diagnosis.figures.world_size)
    assert [line[:4] for line in lines if not line.startswith("  ")] == ["limi", "try:"][
        : len(lines)
    ]
    assert all(len(line) <= 80 for line in lines if not line.startswith("  "))
    assert all("svdpp" not in line for line in lines if not line.startswith("  "))
    assert "1 threads" not in str(diagnosis)
