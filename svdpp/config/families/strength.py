"""Sampling parameter `strength` of video-to-video families, which run a schedule's last steps."""

from __future__ import annotations

import itertools
from typing import Any

from svdpp.config.limits import MAX_STEPS, require
from svdpp.config.sampling import Param

STRENGTH = Param(
    highest=1, help="How much of the video is replaced; 1 replaces all of it.", excludes_lowest=True
)


def all_steps(sampling: Any) -> dict[str, int]:
    """Return `num_inference_steps` for a video-to-video pipeline, so that it runs all steps.

    The pipeline runs only the fraction `strength` of the steps that its argument
    `num_inference_steps` says. So the returned number is larger than the clip's number of steps,
    unless `strength` is 1.

    Args:
        sampling: Resolved sampling parameters, with the field `strength`.
    """
    steps, strength = sampling.num_inference_steps, sampling.strength
    fewest = max(steps, int(steps / strength) - 1)
    found = (total for total in itertools.count(fewest) if int(total * strength) >= steps)
    return {"num_inference_steps": next(found)}


def check_strength(_: object, sampling: Any) -> None:
    """Raise a `RequestError` if `strength` needs a schedule of more than `MAX_STEPS` steps.

    The schedule has `num_inference_steps` / `strength` steps. A clip from a video runs only the
    last `num_inference_steps` steps of the schedule.

    Args:
        sampling: Resolved sampling parameters, with the field `strength`.

    Raises:
        RequestError: The schedule has more than `MAX_STEPS` steps.
    """
    (total,) = all_steps(sampling).values()
    require(
        total <= MAX_STEPS,
        f"`num_inference_steps` {sampling.num_inference_steps} with `strength`="
        f"{sampling.strength:g} needs a schedule of {total} steps, and the limit is {MAX_STEPS}",
        "use fewer `num_inference_steps`, or use a higher strength",
        steps=sampling.num_inference_steps,
        all_steps=total,
        strength=sampling.strength,
        highest=MAX_STEPS,
    )
