"""Measures a draft's time: ranks that draft one clip, against ranks that make one clip each.

Each rank has one thread, so a core stands for a GPU. Cores share caches, memory and often
arithmetic units, so a single rank on an idle machine is faster than each of two. A clip `apart` is
therefore made while all other ranks make one, too. Times are from the start of the clip's encode
to the end of its last step, to the end of its decode, and until its file is written.

    python tests/bench/draft_wall.py [--rounds 3] [--draft-starts 0,14] [--steps 28]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from svdpp.config import (
    ClipRequest,
    DraftConfig,
    ModelConfig,
    OutputConfig,
    PipelineConfig,
    SvdSampling,
    sampling_defaults,
)
from svdpp.driver.pipeline import Pipeline
from svdpp.media.examples import example_photos
from svdpp.plan.actions import Kind
from svdpp.plan.forecast import Span
from svdpp.worker.messages import ClipDone, DraftDone, Event


class Times(NamedTuple):
    """Seconds from the start of a clip's encode, for one result of it."""

    steps: float
    """Until the end of the last step."""
    frames: float
    """Until the end of the decode."""
    file: float
    """Until the file is written."""


def measure_draft(start_steps: tuple[int, ...], num_steps: int) -> tuple[Times, Times]:
    """One clip: its draft and its exact result."""
    spans, written = _run(
        num_steps, 1, len(start_steps), draft=DraftConfig(start_steps=start_steps)
    )
    last = len(start_steps) - 1
    return _times(spans, last, written[DraftDone, 0]), _times(spans, 0, written[ClipDone, 0])


def measure_apart(num_clips: int, num_steps: int) -> Times:
    """One clip, while every other rank makes one, too."""
    spans, written = _run(num_steps, num_clips, num_clips, replicas=num_clips)
    return _times(spans, 0, written[ClipDone, 0])


def _run(
    num_steps: int, num_clips: int, world_size: int, **layout: Any
) -> tuple[list[Span], dict[tuple[type, int], float]]:
    """The spans of a run, and the time at which each file was written."""
    config = PipelineConfig(
        world_size=world_size,
        model=ModelConfig(name="demo"),
        sampling=SvdSampling(num_inference_steps=num_steps, **sampling_defaults("demo")),
        **layout,
    )
    written: dict[tuple[type, int], float] = {}

    def note(_rank: int, event: Event) -> None:
        if isinstance(event, ClipDone | DraftDone):
            written[type(event), event.clip] = time.monotonic()

    image = str(example_photos()[0])
    with tempfile.TemporaryDirectory() as name:
        outputs = [OutputConfig(path=str(Path(name, f"{clip}.mp4"))) for clip in range(num_clips)]
        pipeline = Pipeline(config)
        pipeline.observe(note)
        with pipeline:
            pipeline.run([ClipRequest(seed=0, image=image, output=each) for each in outputs])
    return pipeline.trace.spans, written


def _times(spans: list[Span], rank: int, file: float) -> Times:
    begun = min(span.start for span in spans)
    ends = {each.action.kind: each.end - begun for each in spans if each.rank == rank}
    return Times(ends[Kind.DENOISE], ends[Kind.DECODE], file - begun)


def main() -> None:
    """Prints a line for each round, and the medians of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft-starts", default="0,14")
    parser.add_argument("--steps", type=int, default=28)
    options = parser.parse_args()
    start_steps = tuple(map(int, options.draft_starts.split(",")))
    rounds = len(start_steps) - 1 + options.steps - start_steps[-1]
    ideal = rounds / options.steps
    print(f"starts {options.draft_starts}, {options.steps} steps: {ideal:.3f} of the steps")
    print("seconds to steps, frames, file; ratios draft/apart, exact/apart")
    ratios = []
    for _ in range(options.rounds):
        apart = measure_apart(len(start_steps), options.steps)
        draft, exact = measure_draft(start_steps, options.steps)
        for name, row in (("apart", apart), ("draft", draft), ("exact", exact)):
            print(f"{name} " + " ".join(f"{each:6.2f}" for each in row), end="   ")
        ratios.append(
            [
                ours / theirs
                for each in (draft, exact)
                for ours, theirs in zip(each, apart, strict=True)
            ]
        )
        print(" ".join(f"{each:.3f}" for each in ratios[-1]), flush=True)
    medians = [statistics.median(column) for column in zip(*ratios, strict=True)]
    print("medians " + " ".join(f"{each:.3f}" for each in medians))


if __name__ == "__main__":
    main()
