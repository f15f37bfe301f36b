"""Measures the engine's overhead: the makespan of M clips on W ranks against the ideal.

With T1 the time of one clip's denoising in one process, the ideal is `(M + W - 1) / W * T1`: the
time of a pipeline whose transfers and bookkeeping cost nothing. Encode and decode are left out on
both sides (`decode=False`; the encodes' time is subtracted), because they are not overhead.

T1 is measured twice: alone on the machine, and in W independent processes at once. If cores share
a memory bus or a clock, the second is longer: it is the time of W ranks that never wait. The ratio
to it is the engine's own overhead; the ratio to the first includes the machine's.

    python tests/bench/engine_overhead.py [--world 2] [--clips 8] [--repeats 3]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling, sampling_defaults
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import resolve
from svdpp.media.examples import example_photos
from svdpp.media.image import read_photo
from svdpp.models.determinism import apply_settings
from svdpp.plan.actions import Kind
from svdpp.plan.forecast import Span
from svdpp.plan.layout import Roles
from svdpp.worker.rank import load_model


def one_clip_seconds(config: PipelineConfig, repeats: int) -> list[float]:
    """T1: all steps of one clip in this process, with as many threads as a rank."""
    apply_settings(num_threads=config.num_threads, device="cpu")
    config, checkpoint = resolve(config)
    roles = Roles(encode=True, denoise=True, decode=False)
    model = load_model(config, checkpoint, "cpu", roles)
    image, _ = read_photo(Path(example_photos()[0]))
    tensors = model.encode(model.prepare(image), ClipRequest(seed=0))
    num_steps = config.sampling.num_inference_steps
    model.denoise(tensors, 0, 1, lambda *_: None)  # warm-up
    seconds = []
    for _ in range(repeats):
        begun = time.monotonic()
        model.denoise(tensors, 0, num_steps, lambda *_: None)
        seconds.append(time.monotonic() - begun)
    return seconds


def seconds_at_once(config: PipelineConfig, processes: int) -> list[float]:
    """T1 in several processes that do the same work at once."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        runs = [pool.submit(one_clip_seconds, config, 2) for _ in range(processes)]
        return [seconds for run in runs for seconds in run.result()]


def makespan_seconds(config: PipelineConfig, num_clips: int) -> tuple[float, float, float]:
    """The time from the first step's start to the last step's end, the encodes in it, and the gaps.

    The gaps are the share of the time between the busiest rank's first and last step in which it
    neither denoises nor encodes: the engine's cost, independent of the machine's speed.
    """
    photo = str(example_photos()[0])
    with Pipeline(config) as pipeline:
        pipeline.run([ClipRequest(seed=999, image=photo)])  # warm-up: first use of every link
        warm = len(pipeline.trace.spans)
        pipeline.run([ClipRequest(seed=seed, image=photo) for seed in range(num_clips)])
        spans = pipeline.trace.spans[warm:]
    steps = [span for span in spans if span.action.kind is Kind.DENOISE]
    begin = min(span.start for span in steps)
    encode = sum(s.end - s.start for s in spans if s.action.kind is Kind.ENCODE and s.start > begin)
    gaps = min(_gap_share([s for s in spans if s.rank == r]) for r in range(config.world_size))
    return max(span.end for span in steps) - begin, encode, gaps


def _gap_share(spans: list[Span]) -> float:
    first = min(span.start for span in spans if span.action.kind is Kind.DENOISE)
    elapsed = max(span.end for span in spans) - first
    return 1 - sum(span.end - span.start for span in spans if span.start >= first) / elapsed


def main() -> None:
    """Measures both in turn, prints each round and the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--clips", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    config = PipelineConfig(
        world_size=arguments.world,
        model=ModelConfig(name="demo"),
        sampling=SvdSampling(**sampling_defaults("demo")),
        num_threads=1,
        decode=False,
    )
    world, clips = config.world_size, arguments.clips
    print(f"torch {torch.__version__}, demo model, {world} ranks of 1 thread, {clips} clips")
    alone_ratios, loaded_ratios = [], []
    for number in range(arguments.repeats):
        alone, loaded = seconds_at_once(config, 1), seconds_at_once(config, world)
        makespan, encode, gaps = makespan_seconds(config, clips)
        alone, loaded = alone + seconds_at_once(config, 1), loaded + seconds_at_once(config, world)
        t1, loaded_t1 = statistics.median(alone), statistics.median(loaded)
        share = (clips + world - 1) / world
        alone_ratios.append((makespan - encode) / (share * t1))
        loaded_ratios.append((makespan - encode) / (share * loaded_t1))
        print(
            f"round {number}: makespan {makespan:.2f} s, encode in it {encode:.2f} s; "
            f"T1 alone {t1:.2f} s, ratio {alone_ratios[-1]:.3f}; "
            f"T1 of {world} at once {loaded_t1:.2f} s, ratio {loaded_ratios[-1]:.3f}; "
            f"gaps {gaps:.2%}",
            flush=True,
        )
    print(
        f"median ratio to the ideal: {statistics.median(loaded_ratios):.3f} with T1 of {world} "
        f"processes at once, {statistics.median(alone_ratios):.3f} with T1 alone"
    )


if __name__ == "__main__":
    main()
