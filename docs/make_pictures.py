"""Draws the pictures of the docs from real runs: ranks and time, and the clips themselves.

python docs/make_pictures.py        # needs the `pictures` extra; about two minutes on two cores
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image

from svdpp.cli.seeing import draw_run
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
from svdpp.runtime.pipeline import Pipeline

PICTURES = Path(__file__).parent / "pictures"
_SIDE = 96


def main() -> None:
    """Makes every picture anew."""
    PICTURES.mkdir(exist_ok=True)
    rehearse_seven_ranks()
    animate_photographs()


def rehearse_seven_ranks() -> None:
    """Draws eight clips of the dummy model on seven ranks."""
    config = PipelineConfig(world_size=7, model=ModelConfig(name="dummy"))
    requests = [ClipRequest(seed=seed) for seed in range(8)]
    with Pipeline(config) as pipeline:
        pipeline.run(requests)
    draw_small(pipeline, PICTURES / "ranks.png")


def draw_small(pipeline: Pipeline, path: Path) -> None:
    """The run's timeline in 128 colours: nobody sees it, and it is a third of the file."""
    draw_run(pipeline, path)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def animate_photographs() -> None:
    """Runs the four example photographs through two ranks, and draws run and clips."""
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
    draw_small(pipeline, PICTURES / "timeline.png")
    animate(photos, clips, PICTURES / "clips.gif")


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
