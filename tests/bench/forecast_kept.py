"""Compares runs with their forecasts: the measured makespan against the plan's, for every split.

Seven ranks that sleep the published times of an A100, scaled, are compared with the forecast at
the same times, so nothing is fitted. Two ranks of the demo model are compared with the forecast at
the mean costs of the run itself and of the run before it, because a shared machine drifts. Clips
submitted one at a time, as a service does it, are compared with the same clips submitted together:
the ratio of their throughputs should be 0.98 or more.

    python tests/bench/forecast_kept.py [--clips 28] [--time-scale 0.05] [--demo-clips 6]
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling, sampling_defaults
from svdpp.driver.clips import ClipHandle
from svdpp.driver.pipeline import Pipeline
from svdpp.media.inputs import example_photos
from svdpp.plan.costs import PRESETS, Costs
from svdpp.plan.forecast import replay, summarise
from tests.bench.options import options

_SPLITS: dict[str, dict[str, Any]] = {
    "uniform": {"split": "uniform"},
    "balanced": {"split": "balanced"},
    "alternating": {"split": "alternating"},
    "alternating, 2 decoders": {"split": "alternating", "decoders": 2},
}


def run(config: PipelineConfig, requests: list[ClipRequest]) -> Pipeline:
    """Runs a pipeline to its end and returns it, for its measurements."""
    with Pipeline(config) as pipeline:
        pipeline.run(requests)
    return pipeline


def forecast_seconds(pipeline: Pipeline, requests: list[ClipRequest], costs: Costs) -> float:
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
        promised = forecast_seconds(pipeline, requests, costs)
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


def one_at_a_time(num_clips: int, time_scale: float) -> None:
    """4 and 7 sleeping ranks; a clip is submitted once at most W + 1 clips are unfinished."""
    requests = [ClipRequest(seed=seed) for seed in range(num_clips)]
    print(f"\n{'ranks':>5}{'together s':>12}{'one by one s':>14}{'ratio':>8}")
    for world_size in (4, 7):
        config = PipelineConfig(
            world_size=world_size,
            # Small, so that the dummy computes for much less time than a step sleeps.
            model=ModelConfig(
                name="dummy", dummy_latent_shape=(1, 4, 25, 16, 16), dummy_sleeps=True
            ),
            costs=PRESETS["svd-xt-a100"].scaled(time_scale),
            split="alternating",
        )
        together = run(config, requests).trace.summary().makespan
        unfinished: deque[ClipHandle] = deque()
        with Pipeline(config) as pipeline:
            for request in requests:
                if len(unfinished) > world_size:
                    unfinished.popleft().result()
                unfinished.append(pipeline.submit(request))
            while unfinished:
                unfinished.popleft().result()
        alone = pipeline.trace.summary().makespan
        print(f"{world_size:5}{together:12.2f}{alone:14.2f}{together / alone:8.3f}", flush=True)


def main() -> None:
    asked = options(__doc__, clips=28, time_scale=0.05, demo_clips=6)
    sleeping_ranks(asked.clips, asked.time_scale)
    one_at_a_time(asked.clips, 2 * asked.time_scale)
    if asked.demo_clips:
        demo_model(asked.demo_clips)


if __name__ == "__main__":
    main()
