"""What is special about families that have no file of their own, and about those from a video."""

from __future__ import annotations

import itertools
from typing import Any

from svdpp.config.limits import MAX_STEPS, require
from svdpp.models.engine.configs import Configs, Facts


def latte(configs: Configs) -> Facts:
    """The pipeline makes as many frames as its transformer says, of prompts of a fixed length."""
    frames = configs.of("transformer", video_length=16).count("video_length", 1024)
    return {"unused_parameters": ("max_sequence_length",), "fixed_frames": frames}


def kandinsky5(configs: Configs) -> Facts:
    """Refuses the sparse attention, whose kernels only CUDA has."""
    reason = "as sparse attention needs kernels of CUDA, and was never compared"
    transformer = configs.of("transformer", attention_type="regular")
    transformer.require("attention_type", "regular", reason)
    return {}


def kandinsky5_frames(_: Any, sampling: Any) -> None:
    """Refuses few frames: the pipeline adapts the first four latent frames to those that follow."""
    enough = not sampling.from_image or sampling.num_frames >= 17
    require(enough, f"--frames must be at least 17 from an image, got {sampling.num_frames}")


def one_window(_: Any, sampling: Any) -> None:
    """Refuses more frames, which are made in several loops."""
    frames = sampling.num_frames
    require(frames <= 97, f"--frames must be at most 97 for diffusion forcing, got {frames}")


def all_steps(sampling: Any) -> dict[str, int]:
    """Steps of which the pipeline leaves out the first, as many as `strength` says.

    The steps of a clip are those that run.
    """
    steps, strength = sampling.num_inference_steps, sampling.strength
    fewest = max(steps, int(steps / strength) - 1)
    found = (total for total in itertools.count(fewest) if int(total * strength) >= steps)
    return {"num_inference_steps": next(found)}


def check_strength(_: Any, sampling: Any) -> None:
    """Refuses what makes too many steps of all."""
    (total,) = all_steps(sampling).values()
    require(
        total <= MAX_STEPS,
        f"--steps {sampling.num_inference_steps} are the last of {total} for --param strength="
        f"{sampling.strength:g}, and the limit is {MAX_STEPS}",
        "use fewer --steps or more strength",
    )
