"""Owns a clip's metadata: what its JSON says of the request, and reading that back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from svdpp import __version__
from svdpp.config import Fit, OutputConfig, PipelineConfig, SamplingConfig, VideoFormat
from svdpp.errors import InputError
from svdpp.media import image as photos
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.small_file import read_small_file
from svdpp.redaction import recorded_name, recorded_path

#: 1 had `seconds` in place of compute_seconds and wall_seconds, and no file_sha256.
SCHEMA_VERSION = 2

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

#: What a latent's bits depend on. Number of ranks and split are not among them.
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
    *_SAMPLING_FIELDS,
)
#: What tells two clips apart: two with the same values are the same clip.
IDENTITY = (*_LATENT_IDENTITY, "format", "crf")


def clip_metadata(
    photo: photos.Photo,
    seed: int,
    output: OutputConfig,
    config: PipelineConfig,
    checkpoint: Checkpoint,
) -> dict[str, Any]:
    """What a clip's JSON says of the request; the clip writer adds hashes and times.

    Paths are relative to the JSON's own folder, or to the user's home, so that the JSON does not
    tell whose machine it was.
    """
    folder = Path(output.path).parent
    metadata = {
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
        "deterministic": config.deterministic,
        **{name: getattr(config.sampling, name) for name in _SAMPLING_FIELDS},
        "format": output.format,
        "crf": output.crf,
        "versions": versions(),
        "exact": True,
    }
    return {**metadata, "parameters_sha256": parameters_sha256(metadata)}


def _model_name(checkpoint: Checkpoint) -> str:
    """A folder by its absolute path (or `~/...`), a hub id or `demo` as it was typed."""
    is_folder = checkpoint.fingerprint is not None
    return recorded_name(str(checkpoint.folder) if is_folder else checkpoint.name)


def parameters_sha256(metadata: Mapping[str, Any]) -> str:
    """Hash of the values in `IDENTITY`: equal for equal clips."""
    return _sha256({name: metadata[name] for name in IDENTITY})


def versions() -> dict[str, str]:
    """Versions of svdpp and of the libraries that a clip's bits depend on."""
    return {"svdpp": __version__, **{name: version(name) for name in _LIBRARIES}}


_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _ClipMetadata(BaseModel):
    """What a clip's JSON must hold; strict, since anybody can have written the file.

    Ranges are checked by `svdpp.config`, when a configuration is made of the values.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    # Not Literal[1, 2], which takes true and 1.0 for 1.
    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)]
    input: str
    input_sha256: _Sha256
    output: str
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    model: str
    revision: str | None
    weights_fingerprint: str | None = None  # files of svdpp 0.2 lack fields that have a default
    variant: str | None
    dtype: Literal["fp32", "fp16", "bf16"]
    memory_opt: bool
    channels_last: bool = False
    device: Literal["cpu", "cuda"]
    num_threads: int
    deterministic: bool = False
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
    versions: dict[str, str] = Field(default_factory=dict)
    conditions: dict[str, Any] = Field(default_factory=dict)
    exact: bool | Literal["unproven"] = True
    draft: dict[str, Any] | None = None
    latents_sha256: _Sha256
    frames_sha256: _Sha256
    file_sha256: _Sha256 | None = None

    @field_validator("output")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ValueError("not a file's name")
        return name


def read_clip_metadata(path: Path) -> dict[str, Any]:
    """A clip's JSON, checked, with whatever else it says.

    Raises:
        InputError: it is no such file.
    """
    return checked_clip_metadata(parse_clip_json(path), f"{str(path)!r} is no clip's JSON")


def parse_clip_json(path: Path) -> Any:
    """The value in a clip's JSON, not checked yet.

    Raises:
        InputError: the file cannot be read, or is no JSON.
    """
    data = read_small_file(path, "clip's JSON")
    try:
        # Not read by pydantic, which refuses the escapes in names that are not UTF-8.
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{str(path)!r} is no clip's JSON: {error}") from error


def checked_clip_metadata(values: object, fault: str) -> dict[str, Any]:
    """`values` as a clip's metadata, whose types are right; fields that are missing get defaults.

    Args:
        values: as JSON was parsed.
        fault: how the message of the error begins.

    Raises:
        InputError: naming the first field that is wrong.
    """
    try:
        found = _ClipMetadata.model_validate(values)
        return found.model_dump(exclude={"draft"} - found.model_fields_set)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(f"{fault}: {where}: {first['msg']}".replace("\n", " ")) from error


def embedded_part(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What of a clip's JSON its file holds too: all but the hash of the file itself."""
    return {name: value for name, value in metadata.items() if name != "file_sha256"}


def read_draft(output: OutputConfig) -> dict[str, Any] | None:
    """What the JSON beside `output` says of a draft; None where there is none."""
    try:
        there = read_clip_metadata(Path(output.json_path))
    except InputError:
        return None
    return None if there["exact"] else there.get("draft")


def recorded_sampling(metadata: dict[str, Any]) -> SamplingConfig:
    """The sampler's knobs in a clip's JSON.

    Raises:
        RequestError: no run can have had them.
    """
    return SamplingConfig(**{name: metadata[name] for name in _SAMPLING_FIELDS})


def latents_key(metadata: Mapping[str, Any], checkpoint: Checkpoint) -> str:
    """The key of a clip's latent checkpoints: equal where the latent's bits are.

    A hash of the parameters, the libraries and the weights. The weights of a hub model go by its
    commit, those of a folder by the size and age of its files, since files can be replaced.
    """
    return _sha256(
        {
            **{name: metadata[name] for name in _LATENT_IDENTITY},
            "versions": {name: metadata["versions"][name] for name in _LIBRARIES},
            "weights": checkpoint.revision or _age_of_weights(checkpoint.folder),
        }
    )


def _age_of_weights(folder: Path) -> list[tuple[str, int, int]]:
    found = ((path, path.stat()) for path in sorted(folder.rglob("*.safetensors")))
    return [(str(p.relative_to(folder)), s.st_size, s.st_mtime_ns) for p, s in found]


def _sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
