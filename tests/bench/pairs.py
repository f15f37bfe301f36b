"""Pairs of ranks against single ranks: time of a clip, rate of a queue, forecast and measured.

    python tests/bench/pairs.py sleep    ranks that sleep for their steps, for any number of cores
    python tests/bench/pairs.py decode   the same, for a decode by several ranks
    python tests/bench/pairs.py wan      tiny Wan that computes; needs two free cores
    python tests/bench/pairs.py svd      the demo model; needs two free cores

All ratios are of runs in this process, one after the other.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from svdpp.config import (
    ClipRequest,
    ModelConfig,
    PipelineConfig,
    SamplingConfig,
    SvdSampling,
    WanSampling,
)
from svdpp.driver.pipeline import Pipeline
from svdpp.media.examples import example_photos
from svdpp.plan.actions import Kind
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import Forecast
from svdpp.plan.large_forecast import forecast_layout

STEP = 0.2
_ASSUMED = Costs(step_seconds=STEP)


class Run(NamedTuple):
    """What one run measured."""

    times: Forecast
    forecast: Forecast
    """By the costs of its configuration."""
    steps: float
    """Seconds from the first to the last step of the first clip."""
    costs: Costs


def run(config: PipelineConfig, clips: list[ClipRequest]) -> Run:
    """Makes the clips, after a run that warms up."""
    with Pipeline(config) as pipeline:
        pipeline.run(clips[: config.replicas])
    with Pipeline(config) as pipeline:
        pipeline.run(clips)
    spans = [
        span
        for span in pipeline.trace.spans
        if span.action.clip == 0 and span.action.kind is Kind.DENOISE
    ]
    steps = max(span.end for span in spans) - min(span.start for span in spans)
    forecast = forecast_layout(config.layout, len(clips))
    return Run(pipeline.trace.summary(), forecast, steps, pipeline.trace.costs())


def say(name: str, value: float, bound: str) -> None:
    """Prints one figure and its target."""
    print(f"{name}: {value:.3f} (target: {bound})", flush=True)


def sleep() -> None:
    """Two stages of pairs against four ranks, and a pair against one rank."""

    def config(world_size: int, costs: Costs = _ASSUMED, **pairs: Any) -> PipelineConfig:
        return PipelineConfig(
            world_size=world_size,
            model=ModelConfig(name="dummy", dummy_sleeps=True, dummy_latent_shape=(1, 4, 2, 8, 8)),
            sampling=SvdSampling(num_inference_steps=24),
            costs=costs,
            **pairs,
        )

    # Pairs are forecast by what ranks without pairs took for a step and a transfer.
    queue = [ClipRequest(seed=seed) for seed in range(12)]
    ranks = run(config(4), queue)
    pairs = run(config(4, ranks.costs, cfg_parallel=2), queue)
    rate = ranks.times.seconds_per_clip / pairs.times.seconds_per_clip
    say("rate, pairs over ranks", rate, ">= 0.95")
    say("latency, pairs over ranks", pairs.times.latency.p50 / ranks.times.latency.p50, "<= 0.6")
    off = pairs.times.makespan / pairs.forecast.makespan
    say("makespan, measured over forecast", off, "0.95 to 1.05")
    alone = run(config(1), queue[:1])
    pair = run(config(2, ranks.costs, cfg_parallel=2), queue[:1])
    say("one clip's steps, pair over rank", pair.steps / alone.steps, "<= 0.56")
    off = pair.times.makespan / pair.forecast.makespan
    say("one clip, measured over forecast", off, "0.95 to 1.05")


def decode() -> None:
    """One clip's decode in eight chunks, by four ranks of a pipeline and by both of a pair."""

    def config(world_size: int, **changes: Any) -> PipelineConfig:
        return PipelineConfig(
            world_size=world_size,
            model=ModelConfig(name="dummy", dummy_sleeps=True, dummy_latent_shape=(1, 4, 8, 8, 8)),
            sampling=SvdSampling(num_inference_steps=4, decode_chunk_size=1),
            costs=Costs(step_seconds=STEP, decode_seconds=8.0),
            **changes,
        )

    def seconds(config: PipelineConfig) -> float:
        """From the start of the first decode until the last rank has all frames."""
        with Pipeline(config) as pipeline:
            pipeline.run([ClipRequest(seed=0)])
        kinds = Kind.DECODE, Kind.GATHER
        spans = [span for span in pipeline.trace.spans if span.action.kind in kinds]
        return max(span.end for span in spans) - min(span.start for span in spans)

    alone = seconds(config(1))
    say("decode, 4 ranks over 1", seconds(config(4, decode_ranks=4)) / alone, "<= 0.35")
    say("decode, pair over 1", seconds(config(2, cfg_parallel=2)) / alone, "about 0.5")
    queue = [ClipRequest(seed=seed) for seed in range(8)]
    for changes in ({"world_size": 4, "decode_ranks": 4}, {"world_size": 2, "cfg_parallel": 2}):
        ranks = run(config(**changes), queue)
        name = f"makespan of {changes}, measured over forecast"
        say(name, ranks.times.makespan / ranks.forecast.makespan, "0.95 to 1.05")


def compute(model: ModelConfig, sampling: SamplingConfig, clips: list[ClipRequest]) -> None:
    """One clip on ranks that compute with one thread each, in three rounds; `clips` has two.

    A pair keeps two cores busy, which slows each of them down on most machines: they share memory,
    caches and clock. So a pair is compared with a rank that is alone, and with one of two ranks
    that make a clip each. The forecast takes its costs from the latter.
    """
    config = partial(PipelineConfig, model=model, sampling=sampling, num_threads=1)
    figures: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    for _ in range(3):
        alone = run(config(world_size=1), clips[:1])
        ranks = run(config(world_size=2, replicas=2), clips)
        pair = run(config(world_size=2, cfg_parallel=2, costs=ranks.costs), clips[:1])
        add("one clip's steps, pair over one of two ranks", pair.steps / ranks.steps)
        add("one clip's steps, pair over a rank alone", pair.steps / alone.steps)
        add("one clip, pair over one of two ranks", pair.times.makespan / ranks.times.makespan)
        add("one clip, pair over a rank alone", pair.times.makespan / alone.times.makespan)
        add("one clip, measured over forecast", pair.times.makespan / pair.forecast.makespan)
    bounds = ["<= 0.56, SVD 0.6"] * 2 + ["<= 0.62"] * 2 + ["0.95 to 1.05"]
    for (name, values), bound in zip(figures.items(), bounds, strict=True):
        say(
            f"{name}, median of {', '.join(f'{value:.3f}' for value in values)}",
            median(values),
            bound,
        )


def wan() -> None:
    """A small Wan from text; most of its time is in its steps, as with published weights."""
    from tests.models.tiny_families import save_tiny_wan

    with tempfile.TemporaryDirectory() as folder:
        model = ModelConfig(name=str(save_tiny_wan(Path(folder), width=4, layers=24)))
        sampling = WanSampling(
            num_inference_steps=50, height=256, width=256, num_frames=9, max_sequence_length=8
        )
        compute(model, sampling, [ClipRequest(seed=seed, prompt="the sea") for seed in range(2)])


def svd() -> None:
    """The demo model, whose batch of two is divided."""
    sampling = SvdSampling(num_inference_steps=12, height=256, width=256, num_frames=8)
    image = str(example_photos()[0])
    clips = [ClipRequest(seed=seed, image=image) for seed in range(2)]
    compute(ModelConfig(name="demo"), sampling, clips)


if __name__ == "__main__":
    {"sleep": sleep, "decode": decode, "wan": wan, "svd": svd}[sys.argv[1]]()
