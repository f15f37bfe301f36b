"""What is special about HunyuanVideo, HunyuanVideo-1.5 and FramePack: conditions, sizes, chunks."""

from __future__ import annotations

from typing import Any

from svdpp.config.limits import require
from svdpp.errors import RequestError
from svdpp.models.engine.configs import Configs, Facts

#: Frames that each chunk of a FramePack clip adds, and that the pipeline counts for it.
FRAMEPACK_CHUNK, _FRAMEPACK_WINDOW = 36, 33


def facts(configs: Configs) -> Facts:
    """Refuses an image to video checkpoint that removes frames of the clip."""
    if configs.has("image_processor"):
        transformer = configs.of("transformer", image_condition_type=None)
        reason = "as for others the clip lacks its first four frames"
        transformer.require("image_condition_type", "token_replace", reason)
    return {}


def facts_15(configs: Configs) -> Facts:
    """The pipeline has a fixed length of prompts, and sizes of its own for an image."""
    unit = configs.of("vae", spatial_compression_ratio=16).count("spatial_compression_ratio", 64)
    target = configs.of("transformer", target_size=640).count("target_size", 8192)
    return {"unused_parameters": ("max_sequence_length",), "image_sizes": image_sizes(target, unit)}


def image_sizes(target: int, unit: int) -> tuple[tuple[int, int], ...]:
    """Heights and widths of images whose size the pipeline keeps.

    It takes the first of its own list whose ratio is nearest, on the side of the square.
    """
    sizes = _listed_sizes(target, unit)
    ratios = [round(height / width, 5) for height, width in sizes]

    def kept(height: int, width: int) -> tuple[int, int]:
        ratio = height / width
        fits = [
            k for k, each in enumerate(ratios) if (each <= ratio if ratio >= 1 else each >= ratio)
        ]
        return sizes[min(fits, key=lambda k: abs(ratios[k] - ratio))] if fits else (0, 0)

    return tuple(size for size in sizes if kept(*size) == size)


def _listed_sizes(target: int, unit: int) -> list[tuple[int, int]]:
    """As diffusers' `generate_crop_size_list`."""
    sizes, long, short = [], round((target / unit) ** 2), 1
    patches = long
    while long > 0:
        if max(long, short) / min(long, short) <= 4:
            sizes.append((long * unit, short * unit))
        if (short + 1) * long <= patches:
            short += 1
        else:
            long -= 1
    return sizes


def check_15(checkpoint: Any, sampling: Any) -> None:
    """Refuses the size of a clip from an image that the pipeline would change."""
    size, sizes = (sampling.height, sampling.width), checkpoint.image_sizes
    if not sampling.from_image or size in sizes:
        return
    ratio = sampling.height / sampling.width
    height, width = min(sizes, key=lambda each: abs(each[0] / each[1] - ratio))
    raise RequestError(
        f"from an image the model makes no clips of --height {size[0]} --width {size[1]}",
        f"nearest: --height {height} --width {width}",
    )


def check_framepack(_: Any, sampling: Any) -> None:
    """Refuses a number of frames or steps that does not divide into chunks."""
    frames, steps = sampling.num_frames, sampling.num_inference_steps
    chunks = (frames - 1) // FRAMEPACK_CHUNK
    require(frames > 1, "--frames must be 37 or more")
    require(
        steps % chunks == 0,
        f"--steps counts those of all chunks: for {frames} frames it must be a multiple of "
        f"{chunks}, got {steps}",
    )


def framepack_arguments(sampling: Any) -> dict[str, Any]:
    """Steps of each chunk; the frames by which the pipeline finds the number of chunks."""
    chunks = (sampling.num_frames - 1) // FRAMEPACK_CHUNK
    return {
        "num_frames": chunks * _FRAMEPACK_WINDOW,
        "num_inference_steps": sampling.num_inference_steps // chunks,
    }
