"""Compares runs with their forecasts: the measured makespan against the plan's, for every split.

Seven ranks that sleep the published times of an A100, scaled, are compared with the forecast at
the same times, so nothing is fitted. Two ranks of the demo model are compared with the forecast at
the mean costs of the run itself and of the run before it, because a shared machine drifts.

    python tests/bench/forecast_kept.py [--clips 28] [--time-scale 0.05] [--demo-clips 6]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling, sampling_defaults
from svdpp.driver.pipeline import Pipeline
from svdpp.media.examples import example_photos
from svdpp.plan.costs import PRESETS, Costs
from svdpp.plan.forecast import replay, summarise

_SPLITS: dict[str, dict[str, Any]] = {
    "uniform": {"split": "uniform"},
    "balanced": {"split": "balanced"},
    "dithered": {"split": "dithered"},
    "dithered, 2 decoders": {"split": "dithered", "decoders": 2},
}


def run(config: PipelineConfig, requests: list[ClipRequest]) -> Pipeline:
    """Runs a pipeline to its end and returns it, for its measurements."""
    with Pipeline(config) as pipeline:
        pipeline.run(requests)
    return pipeline


def forecast_seconds(pipeline: Pipeline, requests: list[ClipRequest], costs: Costs) -> float:
    """The makespan of the plan at `costs`."""
    schedule = pipeline.schedule(requests)
    return summarise(replay(schedule, costs), pipeline.config.world_size).makespan


def sleeping_ranks(num_clips: int, time_scale: float) -> None:
    """Seven ranks that sleep the published costs times `time_scale`."""
    costs = PRESETS["svd-xt-a100"].scaled(time_scale)
    config = PipelineConfig(
        world_size=7,
        model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8), dummy_sleeps=True),
        costs=costs,
    )
    requests = [ClipRequest(seed=seed) for seed in range(num_clips)]
    print(f"7 ranks sleep svd-xt-a100 x {time_scale}, {num_clips} clips")
    print(f"{'':24}{'measured':>10}{'forecast':>10}{'ratio':>8}")
    for name, split in {**_SPLITS, "data parallel": {"replicas": 7}}.items():
        pipeline = run(replace(config, **split), requests)
        measured = pipeline.trace.summary().makespan
        promised = pipeline.forecast().makespan
        print(f"{name:24}{measured:10.2f}{promised:10.2f}{measured / promised:8.3f}", flush=True)


def demo_model(num_clips: int) -> None:
    """Two ranks of the demo model, with one thread each."""
    config = PipelineConfig(
        world_size=2,
        model=ModelConfig(name="demo"),
        sampling=SvdSampling(**sampling_defaults("demo")),
    )
    photo = str(example_photos()[0])
    requests = [ClipRequest(seed=seed, image=photo) for seed in range(num_clips)]
    known = run(config, requests[:2]).trace.costs()
    print(f"\n2 ranks of the demo model, {num_clips} clips")
    print(f"{'':24}{'measured':>10}{'own costs':>10}{'ratio':>8}{'costs before':>14}{'ratio':>8}")
    for name, split in {**_SPLITS, "data parallel": {"replicas": 2}}.items():
        pipeline = run(replace(config, **split, costs=known), requests)
        measured, own = pipeline.trace.summary().makespan, pipeline.trace.costs()
        promised = forecast_seconds(pipeline, requests, own)
        before = forecast_seconds(pipeline, requests, known)
        print(
            f"{name:24}{measured:10.2f}{promised:10.2f}{measured / promised:8.3f}"
            f"{before:14.2f}{measured / before:8.3f}",
            flush=True,
        )
        known = own


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", type=int, default=28)
    parser.add_argument("--time-scale", type=float, default=0.05)
    parser.add_argument("--demo-clips", type=int, default=6)
    asked = parser.parse_args()
    sleeping_ranks(asked.clips, asked.time_scale)
    if asked.demo_clips:
        demo_model(asked.demo_clips)


if __name__ == "__main__":
    main()
