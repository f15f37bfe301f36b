"""The request of one clip: its photograph, seed and output files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from svdpp.config.families import SamplingConfig
from svdpp.config.limits import (
    MAX_PROMPT_CHARACTERS,
    MAX_STEPS,
    check_seed,
    check_type,
    check_whole,
    require,
    shown,
)

VideoFormat = Literal["mp4", "gif", "webp", "frames"]

#: Name of a clip's image, or of the video in its place, among its files.
IMAGE = "image"

_MAX_CRF = 51


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Path and encoding of one clip's file."""

    path: str
    format: VideoFormat = "mp4"
    crf: int = 18

    def __post_init__(self) -> None:
        check_type("an output's path", self.path, str)
        require(
            self.format in get_args(VideoFormat),
            f"--format must be one of {', '.join(get_args(VideoFormat))}, got {shown(self.format)}",
        )
        check_whole("--crf", self.crf, 0, _MAX_CRF)

    @property
    def json_path(self) -> str:
        """Path of the clip metadata: the full name of the file plus `.json`.

        So two formats of one clip have different metadata files.
        """
        return f"{self.path}.json"


@dataclass(frozen=True, kw_only=True)
class ClipRequest:
    """One clip: a seed, and a photograph or prompts; the dummy model uses only the seed."""

    seed: int
    image: str | None = None
    """Path of the image file."""
    prompt: str | None = None
    negative_prompt: str | None = None
    """None: diffusers' default, the empty prompt."""
    image_sha256: str | None = None
    """SHA-256 of the file at the time of the check, in hex."""
    videos: Mapping[str, str] = field(default_factory=dict)
    """Paths of the further videos that the family takes, by name; see `CommonSampling.videos`."""
    videos_sha256: Mapping[str, str] = field(default_factory=dict)
    """As `image_sha256`, by name."""
    output: OutputConfig | None = None
    """None: no file is written; the result has only the hashes."""
    latents_key: str | None = None
    """SHA-256, in hex, of everything that the latent's bits depend on. It names the latent
    checkpoints."""
    sampling: SamplingConfig | None = None
    """Sampling parameters of this clip; None: the pipeline's."""
    done_steps: int = 0
    """Steps in the latent checkpoint of an earlier run; 0: no checkpoint."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name in ("prompt", "negative_prompt"):
            check_prompt(f"--{name.replace('_', '-')}", getattr(self, name))
        check_whole("done steps", self.done_steps, 0, MAX_STEPS)
        for name in ("image", "image_sha256", "latents_key"):
            check_type(f"a clip's {name}", getattr(self, name), str, type(None))
        for path in self.videos.values():
            check_type("the path of a clip's video", path, str)
        require(
            self.sampling is None or isinstance(self.sampling, SamplingConfig),
            f"a clip's sampling must be a SamplingConfig, got {shown(self.sampling)}",
        )
        if self.done_steps and self.latents_key is None:
            raise ValueError("done_steps requires latents_key, which names the latent checkpoint")

    @property
    def files(self) -> dict[str, tuple[str, str | None]]:
        """Path and, if known, SHA-256 of all files that the clip is made from, by name."""
        image = {} if self.image is None else {IMAGE: (self.image, self.image_sha256)}
        hashes = self.videos_sha256
        return image | {name: (path, hashes.get(name)) for name, path in self.videos.items()}


def check_prompt(name: str, text: object) -> None:
    """Refuses what is no prompt; None is no prompt, and allowed."""
    check_type(name, text, str, type(None))
    require(
        text is None or (len(str(text)) <= MAX_PROMPT_CHARACTERS and "\0" not in str(text)),
        f"{name} must be a text of at most {MAX_PROMPT_CHARACTERS} characters",
    )
