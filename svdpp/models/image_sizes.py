"""Check of the clip size for models that crop the input image to one of a few sizes."""

from __future__ import annotations

from svdpp.config.limits import require


def check_image_size(target: int, unit: int, height: int, width: int) -> None:
    """Raise a `RequestError` unless HunyuanVideo-1.5 makes clips of the given size from an image.

    Args:
        target: Side of a square clip in pixels. Clips of other shapes have about the same area.
        unit: Number of pixels of which the height and width of all clips must be multiples.
        height: Height of the clip in pixels.
        width: Width of the clip in pixels.

    Raises:
        RequestError: The model does not make clips of this size; the hint names the nearest size.
    """
    from diffusers.pipelines.hunyuan_video1_5 import image_processor  # this import takes seconds

    processor = image_processor.HunyuanVideo15ImageProcessor(vae_scale_factor=unit)
    kept = (  # sizes that the pipeline does not change
        size
        for size in image_processor.generate_crop_size_list(target, unit)
        if processor.calculate_default_height_width(*size, target) == size
    )
    nearest = min(kept, key=lambda size: abs(size[0] / size[1] - height / width))
    require(
        nearest == (height, width),
        f"the model makes no clips of `height` {height} `width` {width} from an image",
        f"use `height` {nearest[0]} and `width` {nearest[1]}",
        height=height,
        width=width,
        nearest_height=nearest[0],
        nearest_width=nearest[1],
    )
