"""Owns one clip of a request: its photograph and seed, and where its file and JSON go."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from svdpp.config.limits import MAX_STEPS, check_type, check_whole, require, shown

VideoFormat = Literal["mp4", "gif", "webp", "frames"]

_MAX_CRF = 51
# torch.Generator.manual_seed takes 64 bits; negative seeds alias positive ones there.
_SEEDS = 2**63


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Where one clip's file goes, and how it is encoded."""

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
        """Where the clip's metadata goes: beside the file, under its whole name and `.json`.

        So two formats of one clip have a JSON each, and it is plain which file a JSON is about.
        """
        return f"{self.path}.json"

    @property
    def draft(self) -> OutputConfig:
        """Where the clip's draft goes: beside it, with `.draft` in its name."""
        suffix = "" if self.format == "frames" else f".{self.format}"
        return replace(self, path=f"{self.path.removesuffix(suffix)}.draft{suffix}")


@dataclass(frozen=True, kw_only=True)
class ClipRequest:
    """One clip: a photograph and a seed; the dummy model takes the seed alone."""

    seed: int
    image: str | None = None
    """Path of the image file."""
    image_sha256: str | None = None
    """Of the file's bytes when the request was checked."""
    output: OutputConfig | None = None
    """None: the clip's hashes come back, no file is written."""
    latents_key: str | None = None
    """sha256, in hex, of all that the latent's bits depend on: names the latent checkpoints."""
    done_steps: int = 0
    """Steps that an earlier run has done and left as a latent checkpoint; 0: none."""

    def __post_init__(self) -> None:
        is_whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        require(
            is_whole and 0 <= self.seed < _SEEDS,
            f"a seed must be 0 to 2^63 - 1, got {shown(self.seed)}",
        )
        check_whole("done steps", self.done_steps, 0, MAX_STEPS)
        for name in ("image", "image_sha256", "latents_key"):
            check_type(f"a clip's {name}", getattr(self, name), str, type(None))
        if self.done_steps and self.latents_key is None:
            raise ValueError("done_steps needs the latents_key of the latent checkpoint")
