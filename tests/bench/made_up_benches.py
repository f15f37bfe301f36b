"""Made-up benches with known figures; no rank is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from svdpp.bench.results import Results
from svdpp.bench.runner import DATA_PARALLEL, ONE_DEVICE, PIPELINE, Bench, Round, read_config
from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.diagnostics.figures import RunFigures, measured_figures
from svdpp.driver.trace import Trace
from svdpp.worker.messages import ActionDone, Finished, Joined, StepDone
from tests.diagnostics.made_up_runs import EVEN, replayed

FIGURES = replayed()
_ALONE = replayed(EVEN, world_size=1)


def config_of(name: str = "dummy", **layout: object) -> PipelineConfig:
    return PipelineConfig(
        world_size=2,
        model=ModelConfig(name=name),
        sampling=SvdSampling(num_inference_steps=2, num_frames=2, decode_chunk_size=2),
        **layout,  # type: ignore[arg-type]
    )


def bench_of(name: str = "dummy", *overrides: str) -> Bench:
    point = read_config("smoke", [f"model.name={name}", *overrides])
    return Bench(point, config_of(name))


def round_of(case: str, number: int, *, seconds: float = 1.0, sha256: str = "aa") -> Round:
    """A clip of two steps, on one rank."""
    config = config_of().alone()
    trace = Trace(1)
    trace(0, Joined(device="cpu", load_seconds=2.0))
    for step in range(2):
        trace(0, StepDone(clip=0, step=step, seconds=seconds / 2))
    trace(0, ActionDone(action="DENOISE c0 0:2", start=5.0, end=5 + seconds, waited=0.0))
    trace(0, Finished(allocated_bytes=None, reserved_bytes=2**30))
    figures = measured_figures(trace, config, config.layout.schedule(1))
    assert figures is not None
    return Round(
        case=case,
        number=number,
        trace=trace,
        figures=replace(figures, start_seconds=3.0),
        sha256=[(sha256, None)],
    )


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
