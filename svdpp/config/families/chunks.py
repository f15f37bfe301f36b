"""Check of `num_inference_steps` for families that make a clip in chunks."""

from __future__ import annotations

from typing import Any

from svdpp.config.limits import require


def check_steps_of_chunks(_: object, sampling: Any) -> None:
    """Raise a `RequestError` unless a clip's steps can be divided equally among its chunks.

    Specs use this function as `FamilySpec.check_sampling`.

    Args:
        sampling: Sampling parameters. `num_inference_steps` counts the steps of all chunks
            together; `steps_unit` is the number of chunks.

    Raises:
        RequestError: `num_inference_steps` is not a multiple of the number of chunks.
    """
    frames, steps = sampling.num_frames, sampling.num_inference_steps
    chunks = sampling.steps_unit
    require(
        steps % chunks == 0,
        f"`num_inference_steps` counts the steps of all chunks, so for a clip of {frames} frames "
        f"({chunks} chunks) it must be a multiple of {chunks}, got {steps}",
        frames=frames,
        chunks=chunks,
        steps=steps,
    )
