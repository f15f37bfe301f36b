"""Folders of benches with known figures, written as a real bench does; no rank is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from svdpp.bench.compare import DATA_PARALLEL, ONE_DEVICE, PIPELINE
from svdpp.bench.results import Results
from svdpp.bench.runner import Bench
from svdpp.diagnostics.figures import RunFigures
from tests.bench.test_bench_runner import bench_of, round_of
from tests.diagnostics.made_up_runs import EVEN, replayed

FIGURES = replayed()
_ALONE = replayed(EVEN, world_size=1)


def begun_bench(root: Path, *overrides: str) -> tuple[Bench, Results]:
    """A bench of the dummy model in which nothing is measured yet."""
    one = bench_of("dummy", *overrides)
    return one, Results(root, one)


def leave_rounds(
    one: Bench,
    kept: Results,
    figures: RunFigures = FIGURES,
    *,
    pipeline: Sequence[float] = (1.0, 1.0, 1.01),
    apart: Sequence[float] = (2.0, 2.0, 2.01),
) -> None:
    """Adds rounds of all cases.

    Args:
        apart: seconds of a clip in data parallel, by round.
    """
    for number, seconds in enumerate(zip(pipeline, apart, pipeline, strict=True)):
        for case, each, found in zip(
            (PIPELINE, DATA_PARALLEL, ONE_DEVICE), seconds, (figures, FIGURES, _ALONE), strict=True
        ):
            done = round_of(case, number, seconds=each)
            makespan = each * found.makespan
            done.figures = replace(found, makespan=makespan, seconds_per_clip=each)
            one.rounds.append(done)
            kept.add(done)


def leave_bench(
    root: Path,
    figures: RunFigures = FIGURES,
    *overrides: str,
    pipeline: Sequence[float] = (1.0, 1.0, 1.01),
    apart: Sequence[float] = (2.0, 2.0, 2.01),
) -> Path:
    """The folder of a finished bench; see `leave_rounds`."""
    one, kept = begun_bench(root, *overrides)
    leave_rounds(one, kept, figures, pipeline=pipeline, apart=apart)
    kept.finish()
    return kept.folder
