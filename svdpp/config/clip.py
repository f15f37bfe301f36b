"""The request of one clip (image, prompt, seed, output), and what identifies a clip."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, get_args

from svdpp.config.families import SAMPLING_CLASSES, SamplingConfig
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
    """One clip: a seed, and an image or prompts; the dummy model uses only the seed."""

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


#: What a latent's bits depend on, besides the sampling parameters and prompts of its family. They
#: do not depend on the number of ranks or the split.
_LATENT_IDENTITY = (
    "input_sha256",
    "seed",
    "model",
    "revision",
    "weights_fingerprint",
    "variant",
    "dtype",
    "memory_opt",
    "channels_last",
    "device",
    "num_threads",
    "deterministic",
)


def identity(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the values that identify a clip: two clips with the same ones are the same."""
    return (*_latent_identity(metadata), "format", "crf")


def _latent_identity(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    family = metadata["family"]
    # Pairs that divide a batch of two may round differently; mixed devices have no pairs.
    in_halves = metadata.get("cfg_parallel", 1) > 1 and metadata.get("exact") == "unproven"
    common = (*_LATENT_IDENTITY, *(["cfg_parallel"] if in_halves else []))
    lora = ("lora",) if "lora" in metadata else ()  # clips of svdpp 0.3 have none
    if family == "svd":  # the family's name is not part of it: clips of svdpp 0.3 have none
        return (*common, *sampling_fields(family))
    videos = ("videos_sha256",) if SAMPLING_CLASSES[family].videos else ()
    prompts = ("prompt", "negative_prompt")
    return (*common, *lora, *videos, "family", *prompts, *sampling_fields(family))


@cache
def sampling_fields(family: str) -> tuple[str, ...]:
    """The names of a family's sampling parameters."""
    names = (field.name for field in fields(SAMPLING_CLASSES[family]))
    return tuple(name for name in names if name != "family")


def parameters_sha256(metadata: Mapping[str, Any]) -> str:
    """The hash of the values that identify a clip, equal for equal clips."""
    return _sha256({name: metadata[name] for name in identity(metadata)})


def latents_key(metadata: Mapping[str, Any], weights: object) -> str:
    """The key of a clip's latent checkpoints: equal keys mean equal latents.

    `weights` is what the weights are now; see `worker.clip_metadata.weights_identity`.
    """
    versions = {name: each for name, each in metadata["versions"].items() if name != "svdpp"}
    values = {name: metadata[name] for name in _latent_identity(metadata)}
    return _sha256({**values, "versions": versions, "weights": weights})


def _sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
