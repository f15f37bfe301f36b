"""Compare measured run times with forecasts, for splits, ways to submit clips, and CFG pairs.

    python -m benchmarks.forecasts splits      seven ranks that sleep for published times, scaled
    python -m benchmarks.forecasts one-by-one  the same ranks, clips submitted one by one
    python -m benchmarks.forecasts demo        two ranks of the demo model, for every split
    python -m benchmarks.forecasts pairs       CFG pairs and single ranks, whose steps sleep
    python -m benchmarks.forecasts decode      ranks that sleep and share a decode
    python -m benchmarks.forecasts wan         a CFG pair that computes with a tiny Wan
    python -m benchmarks.forecasts wan-modular the same Wan as a modular pipeline
    python -m benchmarks.forecasts wan-tiles   a CFG pair that shares a long decode in tiles
    python -m benchmarks.forecasts ltx2        a CFG pair that computes with a tiny LTX-2
    python -m benchmarks.forecasts svd         a CFG pair that computes with the demo model

In a CFG pair, each of two ranks evaluates one branch of the classifier-free guidance. Benchmarks
whose model computes, instead of sleeping, need two free CPU cores. Before each measurement, the
ranks make a clip to warm up.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict, deque
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.options import parser_of
from svdpp.config import (
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
    SamplingConfig,
    SvdSampling,
    WanSampling,
    sampling_defaults,
)
from svdpp.config.families.ltx2 import Ltx2ModularSampling
from svdpp.config.families.wan import WanModularSampling
from svdpp.diagnostics.run_metrics import average_costs
from svdpp.driver.clips import ClipHandle
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.trace import Trace
from svdpp.media.inputs import example_requests
from svdpp.plan.actions import Kind
from svdpp.plan.costs import PRESETS, CostModel
from svdpp.plan.forecast import Forecast, Span, simulate_schedule, summarise
from svdpp.plan.layout import Layout

STEP = 0.2
ROUNDS = 5
_ASSUMED = CostModel(step_seconds=STEP)
_A100 = PRESETS["svd-xt-a100"]
_SPLITS = {
    "uniform": ParallelConfig(split="uniform"),
    "balanced": ParallelConfig(split="balanced"),
    "alternating": ParallelConfig(split="alternating"),
    "alternating, 2 decoders": ParallelConfig(split="alternating", num_decoders=2),
}


class Run(NamedTuple):
    times: Forecast
    steps: float
    """Seconds from the first to the last step of the first clip."""
    costs: CostModel
    """Mean costs of the actions, measured on the clips of this run."""
    layout: Layout

    def over_forecast(self, costs: CostModel) -> float:
        """Return the measured makespan of a run, divided by that of a forecast with `costs`."""
        spans = simulate_schedule(self.layout.schedule(self.times.clips), costs)
        return self.times.makespan / summarise(spans, self.layout.world_size).makespan


def measure(pipeline: Pipeline, num_clips: int) -> Run:
    """Make clips on a pipeline that is already running, and return measurements of these clips."""
    config = pipeline.config
    first = 1 + max((span.clip for span in pipeline.trace.spans), default=-1)
    trace = Trace(config.world_size, first_clip=first)
    pipeline.observe(trace)
    pipeline.run(example_requests(config, num_clips))
    spans = [span for span in trace.spans if span.clip == first]
    steps = seconds_of(spans, Kind.DENOISE)
    return Run(trace.summary(), steps, average_costs(config, [trace]), config.layout)


def seconds_of(spans: list[Span], *kinds: Kind) -> float:
    """Return the seconds from the first start to the last end of the actions of the given kinds."""
    chosen = [span for span in spans if span.action.kind in kinds]
    return max(span.end for span in chosen) - min(span.start for span in chosen)


def run(config: PipelineConfig, num_clips: int) -> Run:
    """Start ranks, make a warm-up clip on each replica, then make and measure `num_clips` clips."""
    with Pipeline(config) as pipeline:
        measure(pipeline, config.parallel.data_parallel_size)
        return measure(pipeline, num_clips)


def say(name: str, value: float) -> None:
    print(f"{name}: {value:.3f}", flush=True)


def _sleeping(
    sampling: SvdSampling, costs: CostModel, world_size: int, *, frames: int = 2, **changes: Any
) -> PipelineConfig:
    shape = (1, 4, frames, 8, 8)
    model = ModelConfig(name="dummy", dummy_sleeps=True, dummy_latent_shape=shape)
    return PipelineConfig(
        world_size=world_size, model=model, sampling=sampling, costs=costs, **changes
    )


def splits() -> None:
    """Compare measured runs of several splits with their forecasts.

    The ranks sleep instead of computing. The forecast uses the times for which they sleep, so it
    does not depend on any measurement.
    """
    costs = _A100.scaled(0.05)
    data_parallel = ParallelConfig(data_parallel_size=7)
    for name, parallel in {**_SPLITS, "data parallel": data_parallel}.items():
        found = run(_sleeping(SvdSampling(), costs, 7, parallel=parallel), 28)
        say(f"{name}: {found.times.makespan:.2f} s, over forecast", found.over_forecast(costs))


def one_by_one() -> None:
    """Compare the rate of clips submitted one by one with that of clips submitted all at once.

    The rates should be equal. With W ranks, at most W + 1 of the clips submitted one by one are
    unfinished at a time.
    """
    for world_size in (4, 7):
        config = _sleeping(
            SvdSampling(),
            _A100.scaled(0.1),
            world_size,
            parallel=ParallelConfig(split="alternating"),
        )
        requests = example_requests(config, 40)
        together = run(config, len(requests)).times.makespan
        unfinished: deque[ClipHandle] = deque()
        with Pipeline(config) as pipeline:
            measure(pipeline, 1)
            trace = Trace(world_size, first_clip=1)
            pipeline.observe(trace)
            for request in requests:
                if len(unfinished) > world_size:
                    unfinished.popleft().result()
                unfinished.append(pipeline.submit(request))
            while unfinished:
                unfinished.popleft().result()
        ratio = together / trace.summary().makespan
        say(f"{world_size} ranks, rate of clips, submitted one by one / all at once", ratio)


def demo() -> None:
    """Compare measured runs of the demo model with their forecasts.

    Each run is compared with two forecasts: by the costs measured in the run itself, and by the
    costs measured in the run before. The difference shows how the machine's speed drifts.
    """
    sampling = SvdSampling(**sampling_defaults("demo"))
    config = PipelineConfig(world_size=2, model=ModelConfig(name="demo"), sampling=sampling)
    known = run(config, 2).costs
    data_parallel = ParallelConfig(data_parallel_size=2)
    for name, parallel in {**_SPLITS, "data parallel": data_parallel}.items():
        found = run(replace(config, parallel=parallel, costs=known), 6)
        say(
            f"{name}: makespan, measured / forecast by its own costs",
            found.over_forecast(found.costs),
        )
        say(
            f"{name}: makespan, measured / forecast by the last run's costs",
            found.over_forecast(known),
        )
        known = found.costs


def pairs() -> None:
    """Compare two stages of CFG pairs with four single ranks, and one CFG pair with one rank."""
    config = partial(_sleeping, SvdSampling(num_inference_steps=24), _ASSUMED)
    ranks, paired = (
        run(config(4), 12),
        run(config(4, parallel=ParallelConfig(cfg_parallel_size=2)), 12),
    )
    say(
        "rate of clips, CFG pairs / single ranks",
        ranks.times.seconds_per_clip / paired.times.seconds_per_clip,
    )
    say("latency, CFG pairs / single ranks", paired.times.latency / ranks.times.latency)
    alone, pair = run(config(1), 1), run(config(2, parallel=ParallelConfig(cfg_parallel_size=2)), 1)
    say("time of one clip's steps, CFG pair / single rank", pair.steps / alone.steps)
    # The forecast for pairs uses the times that single ranks took for steps and transfers.
    say("makespan, measured / forecast", paired.over_forecast(ranks.costs))
    say("time of one clip, measured / forecast", pair.over_forecast(ranks.costs))


def decode() -> None:
    """Compare the time to decode a clip by four ranks or by a CFG pair with the time by one rank.

    The clip is decoded in eight chunks.
    """
    sampling = SvdSampling(num_inference_steps=4, decode_chunk_size=1)
    costs = CostModel(step_seconds=STEP, decode_seconds=8.0)
    config = partial(_sleeping, sampling, costs, frames=8)

    def seconds(config: PipelineConfig) -> float:
        """Return the seconds from the first decode's start until one rank has all frames."""
        with Pipeline(config) as pipeline:
            measure(pipeline, 1)
        return seconds_of(pipeline.trace.spans, Kind.DECODE, Kind.RECV_FRAMES)

    alone = seconds(config(1))
    say(
        "decode, 4 ranks over 1",
        seconds(config(4, parallel=ParallelConfig(decode_parallel_size=4))) / alone,
    )
    say(
        "decode, pair over 1",
        seconds(config(2, parallel=ParallelConfig(cfg_parallel_size=2))) / alone,
    )
    pair = ParallelConfig(cfg_parallel_size=2)
    for size, parallel in ((4, ParallelConfig(decode_parallel_size=4)), (2, pair)):
        queue = run(config(size, parallel=parallel), 8)
        off = queue.over_forecast(queue.layout.costs)
        say(f"makespan of {size} ranks, {queue.layout}, measured / forecast", off)


def compute(model: ModelConfig, sampling: SamplingConfig) -> None:
    """Measure a CFG pair against a single rank and two ranks, which compute with one thread each.

    A CFG pair keeps two cores busy. On most machines this makes both cores slower, because they
    share memory, caches and clock. So the pair is compared with a rank that works alone, and with
    one of two ranks that each make a clip at the same time. The forecast uses the costs of the two
    ranks.
    """
    config = partial(PipelineConfig, model=model, sampling=sampling, num_threads=1)
    configs = (
        config(world_size=1),
        config(world_size=2, parallel=ParallelConfig(data_parallel_size=2)),
        config(world_size=2, parallel=ParallelConfig(cfg_parallel_size=2)),
    )
    rounds: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        pipelines = [stack.enter_context(Pipeline(each)) for each in configs]
        for pipeline in pipelines:
            measure(pipeline, pipeline.config.parallel.data_parallel_size)
        for _ in range(ROUNDS):
            rank, ranks, pair = (
                measure(each, each.config.parallel.data_parallel_size) for each in pipelines
            )
            for name, ratio in _compared(rank, ranks, pair).items():
                rounds[name].append(ratio)
    for name, ratios in rounds.items():
        say(f"{name}, median of {', '.join(f'{ratio:.3f}' for ratio in ratios)}", median(ratios))


def _compared(rank: Run, ranks: Run, pair: Run) -> dict[str, float]:
    # Both ranks of a CFG pair denoise at the same time, but only one of them encodes and decodes.
    # So the costs of encode and decode are those of a rank that works alone.
    lone, whole = rank.costs, pair.times.makespan
    costs = replace(
        ranks.costs, encode_seconds=lone.encode_seconds, decode_seconds=lone.decode_seconds
    )
    return {
        "time of steps, one of two ranks / a rank alone": ranks.steps / rank.steps,
        "time of steps, CFG pair / a rank alone": pair.steps / rank.steps,
        "time of steps, CFG pair / one of two ranks": pair.steps / ranks.steps,
        "time of the whole clip, CFG pair / a rank alone": whole / rank.times.makespan,
        "time of the whole clip, CFG pair / one of two ranks": whole / ranks.times.makespan,
        "time of one clip, measured / forecast": pair.over_forecast(costs),
    }


def wan() -> None:
    """Measure a CFG pair on a small Wan for text-to-video.

    This Wan spends most of its time in steps, as with published weights.
    """
    _small_wan(WanSampling())


def wan_modular() -> None:
    """Measure a CFG pair on the small Wan of `wan` as a modular pipeline of diffusers."""
    _small_wan(WanModularSampling())


def _small_wan(sampling: SamplingConfig) -> None:
    from tests.support.tiny_families import save_tiny

    small = replace(
        sampling,
        num_inference_steps=50,
        height=256,
        width=256,
        num_frames=9,
        max_sequence_length=8,
    )
    with tempfile.TemporaryDirectory() as folder:
        family = sampling.family
        saved = save_tiny(family, Path(folder), width=4, layers=24)
        compute(ModelConfig(name=str(saved), family=family), small)


def wan_tiles() -> None:
    """Measure a CFG pair on a small Wan with a long decode; each rank decodes half of the tiles."""
    from tests.support.tiny_families import save_tiny_wan

    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny_wan(Path(folder), width=2, layers=8)
        sampling = WanSampling(
            num_inference_steps=20, height=256, width=416, num_frames=5, max_sequence_length=8
        )
        compute(ModelConfig(name=str(path), vae_tiling=True), sampling)


def ltx2() -> None:
    """Measure a small LTX-2 whose step has four evaluations, two on each rank of a CFG pair."""
    from tests.support.tiny_families import save_tiny

    heads, head = 4, 64
    wide = {
        "num_layers": 4,
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "cross_attention_dim": heads * head,
    }
    sampling = Ltx2ModularSampling(
        num_inference_steps=6,
        height=32,
        width=32,
        num_frames=9,
        max_sequence_length=64,
        stg_block=1,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny(sampling.family, Path(folder), configs={"transformer": wide})
        compute(ModelConfig(name=str(path), family=sampling.family), sampling)


def svd() -> None:
    """Measure a CFG pair on the demo model; each rank of the pair gets half of a batch of two."""
    sampling = SvdSampling(num_inference_steps=12, height=256, width=256, num_frames=8)
    compute(ModelConfig(name="demo"), sampling)


if __name__ == "__main__":
    functions = (splits, one_by_one, demo, pairs, decode, wan, wan_modular, wan_tiles, ltx2, svd)
    comparisons = {function.__name__.replace("_", "-"): function for function in functions}
    parser = parser_of(__doc__)
    parser.add_argument("comparison", choices=comparisons)
    comparisons[parser.parse_args().comparison]()
