"""The parameter `strength` of clips from a video: their steps are the last ones of a schedule."""

from __future__ import annotations

import itertools
from typing import Any

from svdpp.config.limits import MAX_STEPS, require
from svdpp.config.sampling import Param

STRENGTH = Param(
    highest=1, help="How much of the video is replaced: all of it by 1.", excludes_lowest=True
)


def all_steps(sampling: Any) -> dict[str, int]:
    """Return the argument for the schedule's steps, of which the clip's are the last ones.

    The pipeline leaves out the first ones, by `strength`.
    """
    steps, strength = sampling.num_inference_steps, sampling.strength
    fewest = max(steps, int(steps / strength) - 1)
    found = (total for total in itertools.count(fewest) if int(total * strength) >= steps)
    return {"num_inference_steps": next(found)}


def check_strength(_: object, sampling: Any) -> None:
    """Check that the schedule has at most `MAX_STEPS` steps.

    Raises:
        RequestError: It has more.
    """
    (total,) = all_steps(sampling).values()
    require(
        total <= MAX_STEPS,
        f"`num_inference_steps` {sampling.num_inference_steps} are the last of {total} for "
        f"`strength`={sampling.strength:g}, and the limit is {MAX_STEPS}",
        "use fewer `num_inference_steps` or more strength",
        steps=sampling.num_inference_steps,
        all_steps=total,
        strength=sampling.strength,
        highest=MAX_STEPS,
    )
