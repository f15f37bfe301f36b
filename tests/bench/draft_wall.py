"""How soon is a draft? Two ranks that draft one clip, against one rank that makes it, in turn.

Each rank computes with one thread, so that a rank is to a core what it would be to a GPU. Times are
from the start of the clip's encode to the end of its last step, and to the end of its decode.

    python tests/bench/draft_wall.py [--rounds 3] [--draft-starts 0,14] [--steps 28]
"""

from __future__ import annotations

import argparse
import statistics
from typing import NamedTuple

from svdpp.config import (
    ClipRequest,
    DraftConfig,
    ModelConfig,
    PipelineConfig,
    SamplingConfig,
    sampling_defaults,
)
from svdpp.driver.pipeline import Pipeline
from svdpp.media.examples import example_photos
from svdpp.plan.actions import Kind


class Times(NamedTuple):
    """Seconds from the start of a clip's encode."""

    steps: float
    """To the end of the last step of the rank that is first to have it."""
    clip: float
    """To the end of that rank's decode."""
    exact_steps: float
    """To the end of rank 0's last step."""
    exact: float
    """To the end of rank 0's decode."""


def measure(start_steps: tuple[int, ...], num_steps: int) -> Times:
    """One clip: drafted from `starts`, or by one rank where there is but one."""
    config = PipelineConfig(
        world_size=len(start_steps),
        model=ModelConfig(name="demo"),
        sampling=SamplingConfig(num_inference_steps=num_steps, **sampling_defaults("demo")),
        draft=DraftConfig(start_steps=start_steps) if len(start_steps) > 1 else None,
    )
    with Pipeline(config) as pipeline:
        pipeline.run([ClipRequest(seed=0, image=str(example_photos()[0]))])
    spans, fastest = pipeline.trace.spans, len(start_steps) - 1
    begun = min(span.start for span in spans)

    def last(kind: Kind, rank: int) -> float:
        ends = [each.end for each in spans if (each.rank, each.action.kind) == (rank, kind)]
        return max(ends) - begun

    return Times(
        last(Kind.DENOISE, fastest),
        last(Kind.DECODE, fastest),
        last(Kind.DENOISE, 0),
        last(Kind.DECODE, 0),
    )


def main() -> None:
    """Prints a line for each round, and the medians of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft-starts", default="0,14")
    parser.add_argument("--steps", type=int, default=28)
    options = parser.parse_args()
    start_steps = tuple(map(int, options.start_steps.split(",")))
    rounds = len(start_steps) - 1 + options.steps - start_steps[-1]
    ideal = rounds / options.steps
    print(f"starts {options.start_steps}, {options.steps} steps: ideal ratio of steps {ideal:.3f}")
    columns = (
        *("alone, steps", "with decode", "draft, steps", "with decode"),
        *("steps/alone", "steps/rank 0", "clip/alone", "exact/alone"),
    )
    print("".join(f"{column:>14}" for column in columns))
    ratios = []
    for _ in range(options.rounds):
        alone, draft = measure((0,), options.steps), measure(start_steps, options.steps)
        ratios.append(
            (
                *(draft.steps / alone.steps, draft.steps / draft.exact_steps),
                *(draft.clip / alone.clip, draft.exact / alone.exact),
            )
        )
        seconds = alone.steps, alone.clip, draft.steps, draft.clip
        row = [*(f"{each:.2f}" for each in seconds), *(f"{each:.3f}" for each in ratios[-1])]
        print("".join(f"{cell:>14}" for cell in row), flush=True)
    medians = [statistics.median(column) for column in zip(*ratios, strict=True)]
    print(f"{'medians':>56}" + "".join(f"{each:14.3f}" for each in medians))


if __name__ == "__main__":
    main()
