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
    """Return the argument `num_inference_steps` with which a pipeline runs all steps of a clip.

    Video-to-video pipelines run only the fraction `strength` of the steps that this argument says.
    With a `strength` below 1, the argument must therefore be larger than the clip's number of
    steps: for 20 steps and a `strength` of 0.5, it is 40.

    Args:
        sampling: Resolved sampling parameters of the clip. The field `num_inference_steps` is the
            number of steps that run.
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
