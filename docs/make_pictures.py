"""Draws the README's pictures from a real run: the rank x time chart, and the clips themselves.

python docs/make_pictures.py        # needs the `pictures` extra; about a minute on two cores
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
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
from svdpp.plan.forecast import Forecast, Span
from svdpp.runtime.pipeline import Pipeline

PICTURES = Path(__file__).parent / "pictures"
_HATCHES = {Kind.ENCODE: "....", Kind.DENOISE: "", Kind.DECODE: "////"}
_SIDE = 96


def main() -> None:
    """Runs the four example photographs through two ranks and draws what happened."""
    PICTURES.mkdir(exist_ok=True)
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
    begin = min(span.start for span in spans)
    ranks = max(span.rank for span in spans) + 1
    figure, axes = plt.subplots(figsize=(8, 0.5 * ranks + 1.1), layout="constrained")
    colours = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
    for span in spans:
        axes.barh(
            span.rank,
            span.end - span.start,
            left=span.start - begin,
            height=0.8,
            color=colours[span.action.clip % len(colours)],
            edgecolor="white",
            hatch=_HATCHES[span.action.kind],
        )
        if span.action.kind is Kind.DENOISE:
            middle = (span.start + span.end) / 2 - begin
            text = f"clip {span.action.clip}"
            axes.text(middle, span.rank, text, ha="center", va="center", fontsize=7, color="white")
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.invert_yaxis()
    axes.set_xlabel(
        f"seconds; hatched: decode. {summary.clips} clips in {summary.makespan:.1f} s", fontsize=8
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


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
