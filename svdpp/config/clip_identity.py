"""What identifies a clip, and its latent: the values of its metadata on which its bits depend."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from svdpp.config.families import SAMPLING_CLASSES

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
