"""What is special about HunyuanVideo, HunyuanVideo-1.5 and FramePack: conditions, sizes, chunks."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from svdpp.config.limits import require
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
    return {"unused_parameters": ("max_sequence_length",), "image_sizes": (target, unit)}


def check_15(checkpoint: Any, sampling: Any) -> None:
    """Refuses the size of a clip from an image that the pipeline would change."""
    if not sampling.from_image:
        return
    from diffusers.pipelines.hunyuan_video1_5 import image_processor  # seconds

    (target, unit), height, width = checkpoint.image_sizes, sampling.height, sampling.width
    processor = image_processor.HunyuanVideo15ImageProcessor(vae_scale_factor=unit)

    def is_kept(size: tuple[int, int]) -> bool:
        with suppress(ValueError):  # diffusers' own for a ratio beyond its list
            return bool(processor.calculate_default_height_width(*size, target) == size)
        return False

    sizes = image_processor.generate_crop_size_list(target, unit)  # each ratio once
    sizes.sort(key=lambda size: abs(size[0] / size[1] - height / width))
    nearest = next(filter(is_kept, sizes))
    require(
        nearest == (height, width),
        f"from an image the model makes no clips of --height {height} --width {width}",
        f"nearest: --height {nearest[0]} --width {nearest[1]}",
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
