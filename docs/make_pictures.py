"""Draw the pictures of the docs: timelines of a real run and of plans.

python docs/make_pictures.py [runs|plans]   # needs matplotlib
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from timeline import Panel, draw_timeline

from svdpp.config import (
    ClipRequest,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
)
from svdpp.driver.pipeline import Pipeline
from svdpp.plan.costs import PRESETS
from svdpp.plan.forecast import simulate_schedule, steady_seconds_per_clip, summarise
from svdpp.plan.layout import Layout

PICTURES = Path(__file__).parent / "pictures"


_A100 = PRESETS["svd-xt-a100"]
_PLANNED_CLIPS = 12
_SPLITS = [
    Layout(num_steps=28, world_size=7, costs=_A100),
    Layout(num_steps=28, world_size=7, split="balanced", costs=_A100),
    Layout(num_steps=28, world_size=7, split="alternating", costs=_A100),
    Layout(num_steps=28, world_size=7, data_parallel_size=7, costs=_A100),
]
_WIDER = [
    Layout(num_steps=25, world_size=8, split="alternating", costs=_A100),
    Layout(num_steps=25, world_size=8, split="alternating", num_decoders=2, costs=_A100),
    Layout(num_steps=25, world_size=8, split="alternating", data_parallel_size=2, costs=_A100),
]


def main() -> None:
    """Draw the pictures that the arguments name: of runs, of plans, or both."""
    what = sys.argv[1:] or ["runs", "plans"]
    PICTURES.mkdir(exist_ok=True)
    if "plans" in what:
        draw_plans(_SPLITS, PICTURES / "splits.png")
        draw_plans(_WIDER, PICTURES / "wider_decode.png")
    if "runs" in what:
        rehearse_seven_ranks()


def draw_plans(layouts: Sequence[Layout], path: Path) -> None:
    """Draw the forecast timeline of each layout's first clips, with a common time axis."""
    panels = []
    for layout in layouts:
        rate = 60 / steady_seconds_per_clip(layout)
        title = f"{layout}: {rate:.2f} clips/min of a long queue"
        panels.append(
            Panel(title, simulate_schedule(layout.schedule(_PLANNED_CLIPS), layout.costs))
        )
    draw_timeline(panels, layouts[0].world_size, path)
    make_small(path)


def rehearse_seven_ranks() -> None:
    """Run eight clips on seven ranks, which sleep instead of computing, and draw their timeline."""
    model = ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 14, 8, 8), dummy_sleeps=True)
    costs = _A100.scaled(0.05)
    config = PipelineConfig(
        world_size=7, model=model, parallel=ParallelConfig(split="alternating"), costs=costs
    )
    requests = [ClipRequest(seed=seed) for seed in range(8)]
    with Pipeline(config) as pipeline:
        pipeline.run(requests)
    spans = pipeline.replayed(requests)
    times = {"Measured": pipeline.trace.summary(), "Forecast": summarise(spans, config.world_size)}
    panels = [
        Panel(
            f"{name}: {len(requests)} clips in {of.makespan:.1f} s, bubble {of.bubble:.0%}", shown
        )
        for (name, of), shown in zip(times.items(), (pipeline.trace.spans, spans), strict=True)
    ]
    draw_timeline(panels, config.world_size, PICTURES / "ranks.png")
    make_small(PICTURES / "ranks.png")


def make_small(path: Path) -> None:
    """Reduce a picture file to 128 colours, which makes the file about a third as large."""
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


if __name__ == "__main__":
    main()
