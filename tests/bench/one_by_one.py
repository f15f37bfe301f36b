"""Compares clips submitted one at a time with the same clips submitted together.

Ranks sleep the published times of an A100, scaled. One at a time: a clip is submitted as soon as
fewer than W + `--ahead` clips are unfinished, as a service does it. Prints the throughput of both,
and their ratio, which should be 0.98 or more.

    python tests/bench/one_by_one.py [--world 4 7] [--clips 40] [--time-scale 0.1] [--ahead 1]
"""

from __future__ import annotations

import argparse
from collections import deque

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig
from svdpp.driver.clips import ClipHandle
from svdpp.driver.pipeline import Pipeline
from svdpp.plan.costs import PRESETS

#: Small, so that the dummy's computation takes much less than the sleep of a step: 7 ranks share
#: the cores of one machine.
_LATENT = (1, 4, 25, 16, 16)


def together(pipeline: Pipeline, requests: list[ClipRequest]) -> None:
    """Submits all clips at once."""
    pipeline.run(requests)


def one_by_one(pipeline: Pipeline, requests: list[ClipRequest], limit: int) -> None:
    """Submits each clip as soon as fewer than `limit` are unfinished."""
    unfinished: deque[ClipHandle] = deque()
    for request in requests:
        if len(unfinished) == limit:
            unfinished.popleft().result()
        unfinished.append(pipeline.submit(request))
    while unfinished:
        unfinished.popleft().result()


def main() -> None:
    """Prints one line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, nargs="+", default=[4, 7])
    parser.add_argument("--clips", type=int, default=40)
    parser.add_argument("--time-scale", type=float, default=0.1)
    parser.add_argument("--ahead", type=int, default=1)
    asked = parser.parse_args()
    requests = [ClipRequest(seed=seed) for seed in range(asked.clips)]
    print(f"{'ranks':>5}{'together s':>12}{'one by one s':>14}{'ratio':>8}{'forecast s':>12}")
    for world_size in asked.world:
        config = PipelineConfig(
            world_size=world_size,
            model=ModelConfig(name="dummy", dummy_latent_shape=_LATENT, dummy_sleeps=True),
            costs=PRESETS["svd-xt-a100"].scaled(asked.time_scale),
            split="dithered",
        )
        with Pipeline(config) as pipeline:
            together(pipeline, requests)
        batch, forecast = pipeline.trace.summary().makespan, pipeline.forecast().makespan
        with Pipeline(config) as pipeline:
            one_by_one(pipeline, requests, world_size + asked.ahead)
        single = pipeline.trace.summary().makespan
        ratio = batch / single
        print(f"{world_size:5}{batch:12.2f}{single:14.2f}{ratio:8.3f}{forecast:12.2f}", flush=True)


if __name__ == "__main__":
    main()
