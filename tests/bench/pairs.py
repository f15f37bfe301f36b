"""Pairs of ranks against single ranks: time of a clip, rate of a queue, forecast and measured.

    python tests/bench/pairs.py sleep    ranks that sleep for their steps, for any number of cores
    python tests/bench/pairs.py decode   the same, for a decode by several ranks
    python tests/bench/pairs.py wan      tiny Wan that computes; needs two free cores

All ratios are of runs in this process, one after the other.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling, WanSampling
from svdpp.driver.pipeline import Pipeline
from svdpp.plan.actions import Kind
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import Forecast

STEP = 0.2


def run(config: PipelineConfig, clips: list[ClipRequest]) -> tuple[Forecast, Forecast, float]:
    """Measured and forecast times, and seconds of the first clip's steps; after a warm-up."""
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
    return pipeline.trace.summary(), pipeline.forecast(), steps


def say(name: str, value: float, bound: str) -> None:
    """Prints one figure and its target."""
    print(f"{name}: {value:.3f} (target: {bound})", flush=True)


def sleep() -> None:
    """Two stages of pairs against four ranks, and a pair against one rank."""

    def config(world_size: int, **changes: Any) -> PipelineConfig:
        return PipelineConfig(
            world_size=world_size,
            model=ModelConfig(name="dummy", dummy_sleeps=True, dummy_latent_shape=(1, 4, 2, 8, 8)),
            sampling=SvdSampling(num_inference_steps=24),
            costs=Costs(step_seconds=STEP),
            **changes,
        )

    queue = [ClipRequest(seed=seed) for seed in range(12)]
    four, _, _ = run(config(4), queue)
    pairs, forecast, _ = run(config(4, cfg_parallel=2), queue)
    say("rate, pairs over ranks", four.seconds_per_clip / pairs.seconds_per_clip, ">= 0.95")
    say("latency, pairs over ranks", pairs.latency.p50 / four.latency.p50, "<= 0.6")
    say("makespan, measured over forecast", pairs.makespan / forecast.makespan, "0.95 to 1.05")
    _, _, alone = run(config(1), queue[:1])
    pair, forecast, steps = run(config(2, cfg_parallel=2), queue[:1])
    say("one clip's steps, pair over rank", steps / alone, "<= 0.56")
    say("one clip, measured over forecast", pair.makespan / forecast.makespan, "0.95 to 1.05")


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
        measured, forecast, _ = run(config(**changes), queue)
        name = f"makespan of {changes}, measured over forecast"
        say(name, measured.makespan / forecast.makespan, "0.95 to 1.05")


def wan() -> None:
    """One clip of a small Wan from text, whose ranks compute with one thread each.

    Most of its time is in the steps (0.4 s each), as with published weights.
    """
    from tests.models.tiny_families import save_tiny_wan

    with tempfile.TemporaryDirectory() as folder:
        model = ModelConfig(name=str(save_tiny_wan(Path(folder), width=4, layers=24)))
        sampling = WanSampling(
            num_inference_steps=40, height=256, width=256, num_frames=9, max_sequence_length=8
        )
        clip = [ClipRequest(seed=0, prompt="the sea")]
        one, _, alone = run(PipelineConfig(world_size=1, model=model, sampling=sampling), clip)
        config = PipelineConfig(world_size=2, model=model, sampling=sampling, cfg_parallel=2)
        pair, forecast, steps = run(config, clip)
    say("one clip's steps, pair over rank", steps / alone, "<= 0.56")
    say("one clip, pair over rank", pair.makespan / one.makespan, "<= 0.62")
    say("one clip, measured over forecast", pair.makespan / forecast.makespan, "0.95 to 1.05")


if __name__ == "__main__":
    {"sleep": sleep, "decode": decode, "wan": wan}[sys.argv[1]]()
