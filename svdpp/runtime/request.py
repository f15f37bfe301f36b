"""Owns turning inputs x seeds into clips with outputs and records, checked before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from svdpp import __version__
from svdpp.config import (
    ClipRequest,
    Fit,
    OutputConfig,
    PipelineConfig,
    SamplingConfig,
    VideoFormat,
)
from svdpp.errors import InputError, RequestError
from svdpp.media import image as photos
from svdpp.media import place, video
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

#: What makes a clip the clip it is. World and split are not among them: no bit depends on them.
_IDENTITY = (
    "input_sha256",
    "seed",
    "model",
    "revision",
    "variant",
    "dtype",
    "memory_opt",
    "device",
    "num_threads",
    *_SAMPLING_FIELDS,
    "format",
    "crf",
)


@dataclass(frozen=True, kw_only=True)
class OutputPolicy:
    """Where clips go, and what becomes of files that are there already."""

    folder: Path
    format: VideoFormat = "mp4"
    crf: int = 18
    overwrite: bool = False
    skip_existing: bool = False


@dataclass
class ClipPlan:
    """Clips still to be made, in order, and those that are finished already."""

    requests: list[ClipRequest] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)


def read_inputs(inputs: Sequence[str]) -> list[photos.Photo]:
    """Every photograph that `inputs` name, read whole.

    Raises:
        InputError: naming all that are missing, unreadable or hostile at once.
    """
    return photos.check_inputs(inputs)


def check_outputs(
    found: Sequence[photos.Photo], seeds: Sequence[int], policy: OutputPolicy
) -> None:
    """Checks places and tools for the outputs, before a model is looked for.

    Raises:
        RequestError: two inputs would have one output, or an output exists and nothing says what
            to do with it.
        OutputError: the folder cannot be written, or there is no ffmpeg.
    """
    if policy.overwrite and policy.skip_existing:
        raise RequestError("--overwrite and --skip-existing contradict each other")
    owners: dict[Path, Path] = {}
    for photo in found:
        for seed in seeds:
            path = Path(_output(photo, seed, policy).path)
            if path in owners:
                raise RequestError(
                    f"{str(owners[path])!r} and {str(photo.path)!r} would both become "
                    f"{path.name!r}",
                    "rename one of them, or run them with different --out folders",
                )
            owners[path] = photo.path
    existing = [path for path in owners if path.exists()]
    if existing and not (policy.overwrite or policy.skip_existing):
        raise RequestError(
            f"{len(existing)} of {len(owners)} outputs exist already, the first is "
            f"{str(existing[0])!r}",
            "--skip-existing keeps those that are finished, --overwrite makes them anew",
        )
    for path in existing:
        video.check_output(OutputConfig(path=str(path), format=policy.format, crf=policy.crf))
    place.check_writable(policy.folder)
    if policy.format == "mp4":
        video.find_ffmpeg()


def plan_clips(
    found: Sequence[photos.Photo],
    seeds: Sequence[int],
    policy: OutputPolicy,
    config: PipelineConfig,
    checkpoint: Checkpoint,
) -> ClipPlan:
    """One clip for each photograph and seed, without those that `skip_existing` finds finished.

    Args:
        config: resolved.

    Raises:
        RequestError: an output that was to be skipped was made with other parameters.
    """
    plan = ClipPlan()
    for photo in found:
        for seed in seeds:
            output = _output(photo, seed, policy)
            record = clip_record(photo, seed, output, config, checkpoint)
            finished = _finished(output, record) if policy.skip_existing else None
            if finished is not None:
                plan.skipped.append(finished)
                continue
            plan.records.append(record)
            plan.requests.append(
                ClipRequest(
                    seed=seed, image=str(photo.path), image_sha256=photo.sha256, output=output
                )
            )
    return plan


def clip_record(
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
    return {
        "schema_version": SCHEMA_VERSION,
        "input": recorded_path(photo.path, folder),
        "input_sha256": photo.sha256,
        "output": Path(output.path).name,
        "seed": seed,
        "model": recorded_name(config.model.name),
        "revision": checkpoint.revision,
        "variant": config.model.variant,
        "dtype": config.model.dtype,
        "memory_opt": config.model.memory_opt,
        "device": config.device.partition(":")[0],
        "world_size": config.world_size,
        "split": "uniform",
        "num_threads": config.num_threads,
        **{name: getattr(config.sampling, name) for name in _SAMPLING_FIELDS},
        "format": output.format,
        "crf": output.crf,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of svdpp and of the libraries that a clip's bits depend on."""
    return {"svdpp": __version__, **{name: metadata.version(name) for name in _LIBRARIES}}


class _Record(BaseModel):
    """What a clip's JSON must hold to be recomputed or recognised; strict, since it is a file."""

    model_config = ConfigDict(strict=True, extra="allow")

    schema_version: Literal[1]
    input: str
    input_sha256: str
    output: str
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    model: str
    revision: str | None
    variant: str | None
    dtype: Literal["fp32", "fp16", "bf16"]
    memory_opt: bool
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


def read_record(path: Path) -> dict[str, Any]:
    """A clip's JSON, with whatever else it says.

    Raises:
        InputError: it is no such file.
    """
    try:
        return _Record.model_validate_json(path.read_bytes()).model_dump()
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        what = f"{str(path)!r} is no clip's JSON: {where}: {first['msg']}"
        raise InputError(what.replace("\n", " ")) from error


def recorded_sampling(record: dict[str, Any]) -> SamplingConfig:
    """The knobs that a clip's JSON names.

    Raises:
        RequestError: they are none that could have been run.
    """
    return SamplingConfig(**{name: record[name] for name in _SAMPLING_FIELDS})


def _output(photo: photos.Photo, seed: int, policy: OutputPolicy) -> OutputConfig:
    path = video.clip_path(policy.folder.absolute(), photo.path.stem, seed, policy.format)
    return OutputConfig(path=str(path), format=policy.format, crf=policy.crf)


def _finished(output: OutputConfig, record: dict[str, Any]) -> dict[str, Any] | None:
    """The record of a clip that is there, whole and as asked for; None where it must be made."""
    path, json_path = Path(output.path), Path(output.json_path)
    if not (path.exists() and json_path.exists()):
        return None
    there = read_record(json_path)
    different = [name for name in _IDENTITY if there[name] != record[name]]
    if different:
        name = different[0]
        raise RequestError(
            f"{path.name!r} exists with another {name}: {there[name]!r}, now {record[name]!r}",
            "--overwrite makes it anew; another --out folder keeps both",
        )
    try:
        frames = video.read_frames(path, output.format)
    except InputError:
        return None
    return there if len(frames) == record["num_frames"] else None
