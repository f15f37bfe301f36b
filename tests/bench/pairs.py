"""Pairs of ranks against single ranks: time of a clip, rate of a queue, forecast and measured.

    python tests/bench/pairs.py sleep    ranks that sleep for their steps, for any number of cores
    python tests/bench/pairs.py decode   the same, for a decode by several ranks
    python tests/bench/pairs.py wan      tiny Wan that computes; needs two free cores
    python tests/bench/pairs.py svd      the demo model; needs two free cores

All ratios are of runs in this process. Ranks are warm: they have made a clip before.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from svdpp.config import ModelConfig, PipelineConfig, SamplingConfig, SvdSampling, WanSampling
from svdpp.diagnostics.figures import costs_of
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.trace import Trace
from svdpp.media.inputs import example_requests
from svdpp.plan.actions import Kind
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import Forecast, Span, forecast_layout
from svdpp.plan.layout import Layout

STEP = 0.2
ROUNDS = 5
_ASSUMED = Costs(step_seconds=STEP)
_IN_TIME = "0.95 to 1.05"


class Run(NamedTuple):
    times: Forecast
    steps: float
    """Seconds from the first to the last step of the first clip."""
    costs: Costs
    """The means of these clips."""
    layout: Layout

    def over_forecast(self, costs: Costs) -> float:
        """The time of all clips, over the forecast by `costs`."""
        layout = replace(self.layout, costs=costs)
        return self.times.makespan / forecast_layout(layout, self.times.clips).makespan


def measure(pipeline: Pipeline, num_clips: int) -> Run:
    """Makes clips, and measures these without those before them."""
    config = pipeline.config
    first = 1 + max((span.clip for span in pipeline.trace.spans), default=-1)
    trace = Trace(config.world_size, first_clip=first)
    pipeline.observe(trace)
    pipeline.run(example_requests(config, num_clips))
    spans = [span for span in trace.spans if span.clip == first]
    steps = seconds_of(spans, Kind.DENOISE)
    return Run(trace.summary(), steps, costs_of(config, [trace]), config.layout)


def seconds_of(spans: list[Span], *kinds: Kind) -> float:
    """From the start of the first to the end of the last action of these kinds."""
    chosen = [span for span in spans if span.action.kind in kinds]
    return max(span.end for span in chosen) - min(span.start for span in chosen)


def run(config: PipelineConfig, num_clips: int) -> Run:
    """Makes clips on ranks of their own, after one on each replica that warms up."""
    with Pipeline(config) as pipeline:
        measure(pipeline, config.replicas)
        return measure(pipeline, num_clips)


def say(name: str, value: float, target: str) -> None:
    print(f"{name}: {value:.3f} (target: {target})", flush=True)


def _sleeping(
    sampling: SvdSampling, costs: Costs, world_size: int, *, frames: int = 2, **changes: Any
) -> PipelineConfig:
    shape = (1, 4, frames, 8, 8)
    model = ModelConfig(name="dummy", dummy_sleeps=True, dummy_latent_shape=shape)
    return PipelineConfig(
        world_size=world_size, model=model, sampling=sampling, costs=costs, **changes
    )


def sleep() -> None:
    """Two stages of pairs against four ranks, and a pair against one rank."""

    config = partial(_sleeping, SvdSampling(num_inference_steps=24), _ASSUMED)
    ranks, pairs = run(config(4), 12), run(config(4, cfg_parallel=2), 12)
    rate = ranks.times.seconds_per_clip / pairs.times.seconds_per_clip
    say("rate, pairs over ranks", rate, ">= 0.95")
    say("latency, pairs over ranks", pairs.times.latency / ranks.times.latency, "<= 0.6")
    alone, pair = run(config(1), 1), run(config(2, cfg_parallel=2), 1)
    say("one clip's steps, pair over rank", pair.steps / alone.steps, "<= 0.56")
    # Pairs are forecast by what ranks without pairs took for a step and a transfer.
    say("makespan, measured over forecast", pairs.over_forecast(ranks.costs), _IN_TIME)
    say("one clip, measured over forecast", pair.over_forecast(ranks.costs), _IN_TIME)


def decode() -> None:
    """One clip's decode in eight chunks, by four ranks of a pipeline and by both of a pair."""

    sampling = SvdSampling(num_inference_steps=4, decode_chunk_size=1)
    costs = Costs(step_seconds=STEP, decode_seconds=8.0)
    config = partial(_sleeping, sampling, costs, frames=8)

    def seconds(config: PipelineConfig) -> float:
        """From the start of the first decode until the last rank has all frames."""
        with Pipeline(config) as pipeline:
            measure(pipeline, 1)
        return seconds_of(pipeline.trace.spans, Kind.DECODE, Kind.GATHER)

    alone = seconds(config(1))
    say("decode, 4 ranks over 1", seconds(config(4, decode_ranks=4)) / alone, "<= 0.35")
    say("decode, pair over 1", seconds(config(2, cfg_parallel=2)) / alone, "about 0.5")
    for changes in ({"world_size": 4, "decode_ranks": 4}, {"world_size": 2, "cfg_parallel": 2}):
        queue = run(config(**changes), 8)
        off = queue.over_forecast(queue.layout.costs)
        say(f"makespan of {changes}, measured over forecast", off, _IN_TIME)


def compute(
    model: ModelConfig,
    sampling: SamplingConfig,
    *,
    alone: str = "none",
    beside: str = "none",
    whole_clip: str = "none",
) -> None:
    """One clip on ranks that compute with one thread each, in several rounds.

    A pair keeps two cores busy, which slows each of them down on most machines: they share memory,
    caches and clock. So a pair is compared with a rank that is alone, and with one of two ranks
    that make a clip each. The forecast takes its costs from the latter. `alone` and `beside` are
    the targets of the steps, `whole_clip` of a clip against a rank alone.
    """
    config = partial(PipelineConfig, model=model, sampling=sampling, num_threads=1)
    alone_config, many = config(world_size=1), partial(config, world_size=2)
    configs = alone_config, many(replicas=2), many(cfg_parallel=2)
    figures: dict[tuple[str, str], list[float]] = {}

    def add(name: str, value: float, target: str = "none") -> None:
        figures.setdefault((name, target), []).append(value)

    with ExitStack() as stack:
        pipelines = [stack.enter_context(Pipeline(each)) for each in configs]
        for pipeline in pipelines:
            measure(pipeline, pipeline.config.replicas)
        for _ in range(ROUNDS):
            rank, ranks, pair = (measure(each, each.config.replicas) for each in pipelines)
            add("steps, one of two ranks over a rank alone", ranks.steps / rank.steps)
            add("steps, pair over a rank alone", pair.steps / rank.steps, alone)
            add("steps, pair over one of two ranks", pair.steps / ranks.steps, beside)
            whole = pair.times.makespan
            add("whole clip, pair over a rank alone", whole / rank.times.makespan, whole_clip)
            add("whole clip, pair over one of two ranks", whole / ranks.times.makespan)
            # Both halves of a pair step at the same time, but one of them encodes and decodes.
            lone = rank.costs
            costs = replace(
                ranks.costs, encode_seconds=lone.encode_seconds, decode_seconds=lone.decode_seconds
            )
            add("one clip, measured over forecast", pair.over_forecast(costs), _IN_TIME)
    for (name, target), values in figures.items():
        rounds = ", ".join(f"{value:.3f}" for value in values)
        say(f"{name}, median of {rounds}", median(values), target)


def wan() -> None:
    """A small Wan from text; most of its time is in its steps, as with published weights."""
    from tests.models.tiny_families import save_tiny_wan

    with tempfile.TemporaryDirectory() as folder:
        model = ModelConfig(name=str(save_tiny_wan(Path(folder), width=4, layers=24)))
        sampling = WanSampling(
            num_inference_steps=50, height=256, width=256, num_frames=9, max_sequence_length=8
        )
        compute(model, sampling, alone="<= 0.56", whole_clip="<= 0.62")


def svd() -> None:
    """The demo model, whose batch of two is divided."""
    sampling = SvdSampling(num_inference_steps=12, height=256, width=256, num_frames=8)
    compute(ModelConfig(name="demo"), sampling, beside="<= 0.6")


if __name__ == "__main__":
    {"sleep": sleep, "decode": decode, "wan": wan, "svd": svd}[sys.argv[1]]()
