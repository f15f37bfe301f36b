"""Draws the documents' pictures: rank x time charts of a real run and of plans, and the clips.

python docs/make_pictures.py [run|plans]    # needs the `pictures` extra; the run takes a minute
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from PIL import Image

from svdpp.config import (
    ClipRequest,
    ModelConfig,
    OutputConfig,
    PipelineConfig,
    SamplingConfig,
    sampling_defaults,
)
from svdpp.media.examples import example_photos
from svdpp.media.video import read_frames
from svdpp.models.interface import Frames
from svdpp.plan.actions import Kind
from svdpp.plan.fleet import forecast_layout
from svdpp.plan.forecast import Forecast, Span, replay
from svdpp.plan.layout import Layout
from svdpp.plan.presets import PRESETS
from svdpp.plan.schedule import build_schedule
from svdpp.runtime.pipeline import Pipeline

PICTURES = Path(__file__).parent / "pictures"
_HATCHES = {Kind.ENCODE: "....", Kind.DENOISE: "", Kind.DECODE: "////"}
_SIDE = 96


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


def main() -> None:
    """Draws what the argument names: the run, the plans, or both."""
    what = sys.argv[1:] or ["run", "plans"]
    PICTURES.mkdir(exist_ok=True)
    if "plans" in what:
        draw_plans(_SPLITS, PICTURES / "splits.png")
        draw_plans(_WIDER, PICTURES / "wider_decode.png")
    if "run" in what:
        draw_run()


def draw_run() -> None:
    """Runs the four example photographs through two ranks and draws what happened."""
    photos = example_photos()
    config = PipelineConfig(
        world_size=2,
        model=ModelConfig(name="demo"),
        sampling=SamplingConfig(**sampling_defaults("demo")),
    )
    with tempfile.TemporaryDirectory() as folder:
        outputs = [OutputConfig(path=str(Path(folder, f"{photo.stem}.mp4"))) for photo in photos]
        requests = [
            ClipRequest(seed=0, image=str(photo), output=output)
            for photo, output in zip(photos, outputs, strict=True)
        ]
        with Pipeline(config) as pipeline:
            pipeline.run(requests, [{"fps": 7}] * len(requests))
        clips = [read_frames(Path(output.path), "mp4") for output in outputs]
    draw_timeline(pipeline.trace.spans, pipeline.trace.summary(), PICTURES / "timeline.png")
    animate(photos, clips, PICTURES / "clips.gif")


def draw_timeline(spans: list[Span], summary: Forecast, path: Path) -> None:
    """Ranks x time: a colour for each clip, encode dotted, decode hatched, waiting empty."""
    ranks = max(span.rank for span in spans) + 1
    figure, axes = plt.subplots(figsize=(8, 0.5 * ranks + 1.1), layout="constrained")
    _draw_spans(axes, spans, "clip {}")
    axes.set_xlabel(
        f"seconds; hatched: decode. {summary.clips} clips in {summary.makespan:.1f} s", fontsize=8
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_plans(layouts: Sequence[Layout], path: Path) -> None:
    """The first clips of several layouts above each other, on one axis of time."""
    ranks = layouts[0].world_size
    figure, panels = plt.subplots(
        len(layouts), figsize=(8, 1.75 * len(layouts)), sharex=True, layout="constrained"
    )
    for axes, layout in zip(panels, layouts, strict=True):
        schedule = build_schedule(layout.routes(range(_PLANNED_CLIPS)), ranks)
        _draw_spans(axes, replay(schedule, layout.costs), "{}")
        steady = forecast_layout(layout, 60 * ranks)
        axes.set_title(
            f"{layout}: {60 / steady.cadence:.2f} clips/min once it runs", fontsize=9, loc="left"
        )
        axes.tick_params(labelsize=7)
    panels[-1].set_xlabel("seconds; number: clip; hatched: decode; empty: idle", fontsize=8)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


def _draw_spans(axes: Axes, spans: Sequence[Span], label: str) -> None:
    """A bar for each span, and what was denoised written on it."""
    begin = min(span.start for span in spans)
    shortest = (max(span.end for span in spans) - begin) / 60  # for a number to stand in it
    ranks = max(span.rank for span in spans) + 1
    colours = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
    for span in spans:
        axes.barh(
            span.rank,
            span.end - span.start,
            left=span.start - begin,
            height=0.8,
            color=colours[span.action.clip % len(colours)],
            edgecolor="white",
            linewidth=0.5,
            hatch=_HATCHES[span.action.kind],
        )
        if span.action.kind is Kind.DENOISE and span.end - span.start > shortest:
            middle = (span.start + span.end) / 2 - begin
            text = label.format(span.action.clip)
            axes.text(middle, span.rank, text, ha="center", va="center", fontsize=7, color="white")
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)


def animate(photos: list[Path], clips: list[Frames], path: Path) -> None:
    """Photographs above, their clips below, as one looping GIF."""
    stills = [Image.open(photo).convert("RGB").resize((_SIDE, _SIDE)) for photo in photos]
    frames = []
    for index in range(len(clips[0])):
        sheet = Image.new("RGB", (_SIDE * len(clips), 2 * _SIDE))
        for column, (still, clip) in enumerate(zip(stills, clips, strict=True)):
            sheet.paste(still, (column * _SIDE, 0))
            sheet.paste(Image.fromarray(clip[index]), (column * _SIDE, _SIDE))
        frames.append(sheet.quantize(64))
    frames[0].save(
        path, save_all=True, append_images=frames[1:], duration=1000 // 7, loop=0, optimize=True
    )


if __name__ == "__main__":
    main()
