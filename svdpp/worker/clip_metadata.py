"""Owns a clip's JSON: what it says of the request, what its bits depend on, and reading it back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from svdpp import __version__
from svdpp.config import Fit, OutputConfig, PipelineConfig, SamplingConfig, VideoFormat
from svdpp.errors import InputError, describe_fault
from svdpp.media import image as photos
from svdpp.models.checkpoint import Checkpoint
from svdpp.redaction import recorded_name, recorded_path

SCHEMA_VERSION = 1

_LIBRARIES = ("torch", "diffusers", "transformers", "numpy", "pillow", "imageio-ffmpeg")

_SAMPLING_FIELDS = (
    "num_inference_steps",
    "height",
    "width",
    "num_frames",
    "fps",
    "motion_bucket_id",
    "noise_aug_strength",
    "min_guidance_scale",
    "max_guidance_scale",
    "decode_chunk_size",
    "fit",
)

#: What a latent's bits depend on. World and split are not among them: no bit depends on them.
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
    *_SAMPLING_FIELDS,
)
#: What makes a clip the clip it is.
IDENTITY = (*_LATENT_IDENTITY, "format", "crf")


def clip_metadata(
    photo: photos.Photo,
    seed: int,
    output: OutputConfig,
    config: PipelineConfig,
    checkpoint: Checkpoint,
) -> dict[str, Any]:
    """What a clip's JSON says of the request; the hashes and times are added where they arise.

    Paths are relative to the JSON's own folder, or to the user's home, so that it says nothing of
    whose machine it was.
    """
    folder = Path(output.path).parent
    record = {
        "schema_version": SCHEMA_VERSION,
        "input": recorded_path(photo.path, folder),
        "input_sha256": photo.sha256,
        "output": Path(output.path).name,
        "seed": seed,
        "model": _model_name(checkpoint),
        "revision": checkpoint.revision,
        "weights_fingerprint": checkpoint.fingerprint,
        "variant": config.model.variant,
        "dtype": config.model.dtype,
        "memory_opt": config.model.memory_opt,
        "channels_last": config.model.channels_last,
        "device": config.device.partition(":")[0],
        "world_size": config.world_size,
        "split": config.split,
        "replicas": config.replicas,
        "decoders": config.decoders,
        "num_threads": config.num_threads,
        **{name: getattr(config.sampling, name) for name in _SAMPLING_FIELDS},
        "format": output.format,
        "crf": output.crf,
        "versions": versions(),
        "exact": True,
    }
    return {**record, "parameters_sha256": parameters_sha256(record)}


def _model_name(checkpoint: Checkpoint) -> str:
    """A folder as it is found from anywhere on this machine, all else as it was typed."""
    is_folder = checkpoint.fingerprint is not None
    return recorded_name(str(checkpoint.folder) if is_folder else checkpoint.name)


def parameters_sha256(record: Mapping[str, Any]) -> str:
    """Of all that makes a clip the clip it is: equal where the clips are."""
    return _sha256({name: record[name] for name in IDENTITY})


def versions() -> dict[str, str]:
    """Versions of svdpp and of the libraries that a clip's bits depend on."""
    return {"svdpp": __version__, **{name: metadata.version(name) for name in _LIBRARIES}}


class _ClipMetadata(BaseModel):
    """What a clip's JSON must hold to be recomputed or recognised; strict, since it is a file."""

    model_config = ConfigDict(strict=True, extra="allow")

    schema_version: Literal[1]
    input: str
    input_sha256: str
    output: str
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    model: str
    revision: str | None
    weights_fingerprint: str | None = None  # as in the next ones without: records of 0.2.0
    variant: str | None
    dtype: Literal["fp32", "fp16", "bf16"]
    memory_opt: bool
    channels_last: bool = False
    device: Literal["cpu", "cuda"]
    num_threads: int
    num_inference_steps: int
    height: int
    width: int
    num_frames: int
    fps: int
    motion_bucket_id: int
    noise_aug_strength: float
    min_guidance_scale: float
    max_guidance_scale: float
    decode_chunk_size: int
    fit: Fit
    format: VideoFormat
    crf: int
    latents_sha256: str
    frames_sha256: str


def read_clip_metadata(path: Path) -> dict[str, Any]:
    """A clip's JSON, with whatever else it says.

    Raises:
        InputError: it is no such file.
    """
    try:
        # Not read by pydantic, which refuses the escapes in names that are not UTF-8.
        return _ClipMetadata.model_validate(json.loads(path.read_bytes())).model_dump()
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        what = f"{str(path)!r} is no clip's JSON: {where} {describe_fault(first)}"
        raise InputError(what) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{str(path)!r} is no clip's JSON: {error}") from error


def read_draft(output: OutputConfig) -> dict[str, Any] | None:
    """What the JSON beside `output` says of an approximation; None where there is none."""
    try:
        there = read_clip_metadata(Path(output.json_path))
    except InputError:
        return None
    about = there.get("draft")
    return about if there.get("exact") is False and isinstance(about, dict) else None


def recorded_sampling(record: dict[str, Any]) -> SamplingConfig:
    """The knobs that a clip's JSON names.

    Raises:
        RequestError: they are none that could have been run.
    """
    return SamplingConfig(**{name: record[name] for name in _SAMPLING_FIELDS})


def latents_key(record: Mapping[str, Any], checkpoint: Checkpoint) -> str:
    """Names the packets of a clip whose latent has these bits.

    A hash of the parameters, the libraries and the weights: a hub model's by its commit, a
    folder's by the size and age of its files, since its name stays when its files are replaced.
    """
    return _sha256(
        {
            **{name: record[name] for name in _LATENT_IDENTITY},
            "versions": {name: record["versions"][name] for name in _LIBRARIES},
            "weights": checkpoint.revision or _age_of_weights(checkpoint.folder),
        }
    )


def _age_of_weights(folder: Path) -> list[tuple[str, int, int]]:
    found = ((path, path.stat()) for path in sorted(folder.rglob("*.safetensors")))
    return [(str(p.relative_to(folder)), s.st_size, s.st_mtime_ns) for p, s in found]


def _sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
