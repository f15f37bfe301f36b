"""The example inputs of the package: photographs, a prompt, and clips made of them."""

from __future__ import annotations

from pathlib import Path

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.config.sampling import PromptedSampling
from svdpp.errors import RequestError

_FOLDER = Path(__file__).resolve().parent.parent / "assets" / "photos"

#: For commands that need any prompt.
EXAMPLE_PROMPT = "a rowing boat drifts on a calm lake"


def example_photos() -> list[Path]:
    """Four photographs, sorted by name; the README in their folder gives their origin."""
    return sorted(_FOLDER.glob("*.jpg"))


def numbered_prompt(prompt: str, number: int) -> str:
    """`prompt` for one of several clips; they differ, because a rank encodes equal ones once."""
    return f"{prompt}, take {number}"


def example_requests(
    config: PipelineConfig, num_clips: int, *, seed: int = 0, prompt: str | None = None
) -> list[ClipRequest]:
    """Clips with all that the model needs: the first photograph, a prompt, or both.

    Each has its own seed and, if the model takes prompts, its own prompt: `prompt` or an example.
    """
    sampling, is_dummy = config.sampling, config.model.is_dummy
    takes_prompts = isinstance(sampling, PromptedSampling)
    if prompt is not None and not takes_prompts:
        raise RequestError(f"--prompt is not for {config.model.name}", "leave --prompt out")
    takes_image = sampling.from_image if isinstance(sampling, PromptedSampling) else not is_dummy
    image = str(example_photos()[0]) if takes_image else None
    text = EXAMPLE_PROMPT if prompt is None else prompt
    return [
        ClipRequest(
            seed=seed + clip,
            image=image,
            videos={} if image is None else dict.fromkeys(sampling.videos, image),
            prompt=numbered_prompt(text, clip + 1) if takes_prompts else None,
        )
        for clip in range(num_clips)
    ]
