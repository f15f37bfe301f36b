"""Folders of benches with known figures, written as a real bench does; no rank is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from svdpp.bench.compare import DATA_PARALLEL, ONE_DEVICE, PIPELINE
from svdpp.bench.results import Results
from svdpp.diagnostics.figures import RunFigures
from tests.bench.test_bench_runner import bench_of, round_of
from tests.diagnostics.made_up_runs import EVEN, replayed

FIGURES = replayed()
_ALONE = replayed(EVEN, world_size=1)


def leave_bench(root: Path, figures: RunFigures = FIGURES) -> Path:
    """The folder of a finished bench; data parallel takes twice as long as the pipeline."""
    one = bench_of("dummy")
    kept = Results(root, one)
    for number, seconds in enumerate((1.0, 1.01, 1.02)):
        for case, each, found in (
            (PIPELINE, seconds, figures),
            (DATA_PARALLEL, 2 * seconds, FIGURES),
            (ONE_DEVICE, seconds, _ALONE),
        ):
            done = round_of(case, number, seconds=each)
            makespan = each * found.makespan
            done.figures = replace(found, makespan=makespan, seconds_per_clip=each)
            one.rounds.append(done)
            kept.add(done)
    kept.finish()
    return kept.folder
