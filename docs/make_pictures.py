"""Draws the pictures of the docs: ranks and time of a real run and of plans.

python docs/make_pictures.py [runs|plans]   # needs the `pictures` extra
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from svdpp.cli.trace_outputs import draw_run
from svdpp.config import (
    ClipRequest,
    ModelConfig,
    PipelineConfig,
)
from svdpp.driver.pipeline import Pipeline
from svdpp.media.timeline import Panel, draw_timeline
from svdpp.plan.costs import PRESETS
from svdpp.plan.draft import DraftPlan
from svdpp.plan.forecast import replay
from svdpp.plan.large_forecast import steady_seconds_per_clip
from svdpp.plan.layout import Layout
from svdpp.plan.schedule import build_schedule

PICTURES = Path(__file__).parent / "pictures"


_A100 = PRESETS["svd-xt-a100"]
_PLANNED_CLIPS = 12
_SPLITS = [
    Layout(num_steps=28, world_size=7, costs=_A100),
    Layout(num_steps=28, world_size=7, split="balanced", costs=_A100),
    Layout(num_steps=28, world_size=7, split="dithered", costs=_A100),
    Layout(num_steps=28, world_size=7, replicas=7, costs=_A100),
]
_WIDER = [
    Layout(num_steps=25, world_size=8, split="dithered", costs=_A100),
    Layout(num_steps=25, world_size=8, split="dithered", decoders=2, costs=_A100),
    Layout(num_steps=25, world_size=8, split="dithered", replicas=2, costs=_A100),
]


_PLAN = DraftPlan(num_steps=28, start_steps=(0, 8, 12, 16))


def main() -> None:
    """Draws what the arguments name: pictures of runs, of plans, or both."""
    what = sys.argv[1:] or ["runs", "plans"]
    PICTURES.mkdir(exist_ok=True)
    if "plans" in what:
        draw_plans(_SPLITS, PICTURES / "splits.png")
        draw_plans(_WIDER, PICTURES / "wider_decode.png")
        draw_draft_plan(_PLAN, PICTURES / "draft_plan.png")
    if "runs" in what:
        rehearse_seven_ranks()


def draw_plans(layouts: Sequence[Layout], path: Path) -> None:
    """The first clips of several layouts above each other, on one axis of time."""
    panels = []
    for layout in layouts:
        schedule = build_schedule(layout.routes(range(_PLANNED_CLIPS)), layout.world_size)
        rate = 60 / steady_seconds_per_clip(layout)
        title = f"{layout}: {rate:.2f} clips/min of a long queue"
        panels.append(Panel(title, replay(schedule, layout.costs)))
    draw_timeline(panels, layouts[0].world_size, path)
    make_small(path)


def draw_draft_plan(draft_plan: DraftPlan, path: Path) -> None:
    """Ranks and rounds of a draft: a square for each step, arrows for words between ranks."""
    figure = Figure(figsize=(10, 0.62 * draft_plan.world_size + 1.1), layout="constrained")
    axes = figure.subplots()
    colours = colormaps["viridis_r"]
    for rank, start in enumerate(draft_plan.start_steps):
        for step in range(start, draft_plan.num_steps):
            place = rank + step - start, rank - 0.28
            shade = colours(0.1 + 0.8 * step / draft_plan.num_steps)
            axes.add_patch(Rectangle(place, 0.94, 0.56, facecolor=shade))
            middle = place[0] + 0.47, rank
            light = "white" if step > draft_plan.num_steps / 2 else "black"
            axes.annotate(str(step), middle, color=light, ha="center", va="center", fontsize=7)
        what = (
            "exact" if rank == 0 else ("draft" if rank == draft_plan.world_size - 1 else "nearer")
        )
        done = draft_plan.rounds(rank)
        axes.annotate(f" {what} after {done}", (done, rank), va="center", fontsize=9)
        if rank:
            _arrow(axes, (rank - 0.5, rank - 0.72), (rank + 0.4, rank - 0.3), "#c53a32")
        for correction in draft_plan.corrections(rank):
            round_ = rank + correction.at - 1 - start + 0.5
            _arrow(axes, (round_, rank - 0.72), (round_, rank - 0.3), "#222222")
    axes.set(
        xlim=(0, draft_plan.num_steps + 4),
        ylim=(draft_plan.world_size - 0.4, -0.6),
        xlabel="rounds; red: a long step ahead, black: what the rank above found where it met",
        yticks=range(draft_plan.world_size),
        yticklabels=[f"rank {rank}" for rank in range(draft_plan.world_size)],
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    make_small(path)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def rehearse_seven_ranks() -> None:
    """Draws eight clips on seven ranks that sleep a twentieth of what an A100 takes."""
    model = ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 14, 8, 8), dummy_sleeps=True)
    costs = _A100.scaled(0.05)
    config = PipelineConfig(world_size=7, model=model, split="dithered", costs=costs)
    requests = [ClipRequest(seed=seed) for seed in range(8)]
    with Pipeline(config) as pipeline:
        pipeline.run(requests)
    draw_small(pipeline, PICTURES / "ranks.png")


def draw_small(pipeline: Pipeline, path: Path) -> None:
    """The run's timeline."""
    draw_run(pipeline, path)
    make_small(path)


def make_small(path: Path) -> None:
    """Reduces the picture to 128 colours, which makes the file three times smaller."""
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


if __name__ == "__main__":
    main()
