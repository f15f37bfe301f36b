"""Creation, parsing and checks of a clip's metadata: the content of the clip's JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    field_validator,
)

from svdpp import __version__
from svdpp.config import (
    SAMPLING_CLASSES,
    Dtype,
    OutputConfig,
    PipelineConfig,
    SamplingConfig,
    VideoFormat,
    sampling_from,
)
from svdpp.config.limits import MAX_SEED, read_small_file
from svdpp.config.pipeline import ENCODING_FIELDS, parameters_sha256, sampling_fields
from svdpp.config.sampling import as_whole
from svdpp.errors import InputError, describe_fault, fault_details, recorded_name, recorded_path
from svdpp.media.images import MediaFile
from svdpp.media.inputs import ClipInput
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.lora_files import LoraFile

#: Schema version of a clip's JSON. Version 1 had `seconds` instead of `compute_seconds` and
#: `wall_seconds`, and no `file_sha256`.
SCHEMA_VERSION = 2

_LIBRARIES = ("torch", "diffusers", "transformers", "numpy", "pillow", "imageio-ffmpeg")


def divides_batches(config: PipelineConfig, checkpoint: Checkpoint | None) -> bool:
    """Whether two ranks share each step (`cfg_parallel` 2) by dividing the denoiser's batch.

    The batch contains the conditional and the unconditional input of classifier-free guidance, and
    each rank evaluates one of the two. Kernels may give other bits for half a batch, so svdpp does
    not promise that such clips are bitwise equal to diffusers' clips.

    Args:
        config: Configuration of the pipeline.
        checkpoint: Checkpoint of the model; None for the dummy model, which has no batch.
    """
    is_batch = checkpoint is not None and checkpoint.spec.branches == "batch"
    return config.parallel.cfg_parallel_size > 1 and is_batch


def clip_metadata(
    inputs: ClipInput,
    seed: int,
    output: OutputConfig,
    config: PipelineConfig,
    checkpoint: Checkpoint,
    loras: Sequence[LoraFile] = (),
) -> dict[str, Any]:
    """Return the fields of a clip's JSON that are known before the clip is made.

    The rank that writes the clip adds hashes and times later.

    Args:
        inputs: Images, videos and prompts of the clip.
        seed: Seed of the noise.
        output: File of the clip. Paths in the JSON are relative to the folder of this file or to
            the home folder, so that the user's name is hidden.
        config: Resolved configuration.
        checkpoint: Checkpoint of the model.
        loras: LoRAs of only this clip. The JSON also gets the model's LoRAs.
    """
    loras = (*checkpoint.loras, *loras)
    folder, media_file, sampling = Path(output.path).parent, inputs.media_file, config.sampling
    metadata = {
        "schema_version": SCHEMA_VERSION,
        "family": sampling.family,
        "input": None if media_file is None else recorded_path(media_file.path, folder),
        "input_sha256": None if media_file is None else media_file.sha256,
        **_last_image(inputs.last_image, folder),
        **_references(inputs.references, folder),
        **(_videos(inputs, folder) if sampling.videos else {}),
        "output": Path(output.path).name,
        "seed": seed,
        "model": _model_name(checkpoint),
        "revision": checkpoint.revision,
        "weights_fingerprint": checkpoint.fingerprint,
        **_components(checkpoint),
        "variant": config.model.variant,
        **_loras(loras),
        **_denoisers(checkpoint),
        **_fields(config.model, "dtype", "memory_opt", "channels_last"),
        **({"vae_tiling": True} if config.model.vae_tiling else {}),
        **_attention_backend(config),
        "device": config.device.partition(":")[0],
        "world_size": config.world_size,
        **config.parallel.to_json(),
        **_fields(config, "num_threads", "deterministic"),
        **({} if sampling.family == "svd" else _fields(inputs, *_PROMPT_FIELDS)),
        **_fields(sampling, *sampling_fields(sampling.family)),
        **_fields(output, *ENCODING_FIELDS),
        "versions": versions() | _versions_of_extras(config, checkpoint, loras),
        "exact": "unproven" if divides_batches(config, checkpoint) else True,
    }
    return {**metadata, "parameters_sha256": parameters_sha256(metadata)}


def _fields(values: object, *names: str) -> dict[str, Any]:
    return {name: getattr(values, name) for name in names}


def _last_image(image: MediaFile | None, folder: Path) -> dict[str, str]:
    if image is None:
        return {}
    return {"last_image": recorded_path(image.path, folder), "last_image_sha256": image.sha256}


def _references(images: Sequence[MediaFile], folder: Path) -> dict[str, list[str]]:
    if not images:
        return {}
    return {
        "references": [recorded_path(image.path, folder) for image in images],
        "references_sha256": [image.sha256 for image in images],
    }


def _videos(inputs: ClipInput, folder: Path) -> dict[str, dict[str, str]]:
    videos = dict(inputs.videos)
    return {
        "videos": {name: recorded_path(video.path, folder) for name, video in videos.items()},
        "videos_sha256": {name: video.sha256 for name, video in videos.items()},
    }


def _components(checkpoint: Checkpoint) -> dict[str, Any]:
    revisions = checkpoint.external_components
    return {"components": revisions} if revisions else {}


def _loras(files: Sequence[LoraFile]) -> dict[str, Any]:
    loras = [
        {
            **asdict(file.lora),
            "name": recorded_name(file.lora.name),
            "ignored": dict(file.ignored),
        }
        for file in files
    ]
    return {"lora": loras} if loras else {}


def _denoisers(checkpoint: Checkpoint) -> dict[str, Any]:
    files = [file.denoiser for file in checkpoint.denoisers]
    recorded = [{**asdict(each), "name": recorded_name(each.name)} for each in files]
    return {"denoiser": recorded} if recorded else {}


def _attention_backend(config: PipelineConfig) -> dict[str, Any]:
    name = config.model.attention_backend
    return {} if name is None else {"attention_backend": name}


#: Packages with the kernels of attention backends, by the beginning of the backend's name. Backends
#: that are not listed run torch's kernels.
_ATTENTION_PACKAGES = {
    **{"_flash_3": "flash_attn_3", "_flash_varlen_3": "flash_attn_3", "flash": "flash_attn"},
    **{"sage": "sageattention", "_sage": "sageattention", "xformers": "xformers"},
}


def _versions_of_extras(
    config: PipelineConfig, checkpoint: Checkpoint, loras: Sequence[LoraFile]
) -> dict[str, str]:
    backend = config.model.attention_backend or ""
    packages = [each for name, each in _ATTENTION_PACKAGES.items() if backend.startswith(name)]
    used = {
        "peft": loras,
        "gguf": checkpoint.denoisers,
        "torchao": checkpoint.int8_denoisers,
        **dict.fromkeys(packages, True),
    }
    return {name: version(name) for name, is_used in used.items() if is_used}


def _model_name(checkpoint: Checkpoint) -> str:
    """Return the model's name for a clip's JSON: path of a folder (`~/...`), hub id, or `demo`."""
    is_folder = checkpoint.fingerprint is not None
    return recorded_name(str(checkpoint.folder) if is_folder else checkpoint.name)


@cache
def versions() -> dict[str, str]:
    """Return the versions of svdpp and of libraries that can change the bits of clips, by name."""
    return {"svdpp": __version__, **{name: version(name) for name in _LIBRARIES}}


_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Source of a component that is not from the model's own repository: OWNER/NAME@COMMIT.
_ComponentRevision = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+@[0-9a-f]{40}$")]


class _DenoiserMetadata(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: str
    expert: Literal["high", "low"] | None
    revision: str | None
    sha256: _Sha256


class _LoraMetadata(_DenoiserMetadata):
    weight: float
    ignored: dict[str, int] = Field(default_factory=dict)


class _ClipMetadata(BaseModel):
    """Schema of a clip's JSON. The schema is strict, because the file is untrusted input.

    `svdpp.config` checks the ranges of the values when a configuration is built from them.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    # The type is not Literal[1, 2], because pydantic's Literal would accept true and 1.0 as 1.
    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)]
    family: str
    input: str | None
    input_sha256: _Sha256 | None
    last_image: str | None = None  # the field exists only for clips that end at an image
    last_image_sha256: _Sha256 | None = None
    # The next two fields exist only for clips with reference images.
    references: list[str] = Field(default_factory=list)
    references_sha256: list[_Sha256] = Field(default_factory=list)
    output: str
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)]
    model: str
    revision: str | None
    weights_fingerprint: str | None = None  # svdpp 0.2 did not write this field
    components: dict[str, _ComponentRevision] = Field(default_factory=dict)
    variant: str | None
    lora: list[_LoraMetadata] = Field(default_factory=list)
    denoiser: list[_DenoiserMetadata] = Field(default_factory=list)
    dtype: Dtype
    memory_opt: bool
    channels_last: bool = False
    # The next two fields are missing from the JSON if the clip was made without these options.
    vae_tiling: bool = False
    attention_backend: str | None = None
    device: Literal["cpu", "cuda"]
    num_threads: int
    deterministic: bool = False
    num_frames: int
    format: VideoFormat
    crf: int
    versions: dict[str, str] = Field(default_factory=dict)
    conditions: dict[str, Any] = Field(default_factory=dict)
    exact: bool | Literal["unproven", "memory_pressure"] = True
    latents_sha256: _Sha256
    frames_sha256: _Sha256
    audio_sha256: _Sha256 | None = None  # the field exists only for clips with sound
    file_sha256: _Sha256 | None = None

    @field_validator("output")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ValueError("not a file name")
        return name


# A whole number of frames per second stays an int, because `parameters_sha256` is a hash of JSON
# text, in which 8 and 8.0 differ.
_Fps = Annotated[float, AfterValidator(as_whole)]
# Metadata fields that only clips of SVD have, and fields that only clips with prompts have.
_SVD_FIELDS = {"input": str, "input_sha256": _Sha256, "decode_chunk_size": int}
_PROMPT_FIELDS = {"prompt": str, "negative_prompt": str | None}


@cache  # built at a family's first clip, because building all of them takes 0.2 s
def _metadata_model(family: str) -> type[_ClipMetadata]:
    kind = SAMPLING_CLASSES[family]
    types, common = get_type_hints(kind), {*_ClipMetadata.model_fields, "from_image"}
    names = [name for name in sampling_fields(family) if name not in common]
    hints: dict[str, Any] = {name: types[name] for name in names}
    hints["fps"] = _Fps
    hints |= _SVD_FIELDS if family == "svd" else _PROMPT_FIELDS
    hints |= {"videos": dict[str, str], "videos_sha256": dict[str, _Sha256]} if kind.videos else {}
    fields: dict[str, Any] = {name: (hint, ...) for name, hint in hints.items()}
    if family == "svd":  # early SVD clips have no `family` in their JSON, so it gets a default
        fields["family"] = (Literal["svd"], "svd")
    return create_model(f"_{family}", __base__=_ClipMetadata, **fields)


# Fields that only some clips have in their metadata.
_MAY_BE_MISSING = {
    *("audio_sha256", "components", "lora", "denoiser", "attention_backend"),
    *("last_image", "last_image_sha256", "references", "references_sha256", "vae_tiling"),
}


def parse_clip_json(path: Path) -> Any:
    """Parse a clip's JSON file, without checking the fields.

    Raises:
        InputError: The file cannot be read, is too large, or is not JSON.
    """
    data = read_small_file(path, "clip's JSON")
    try:
        # Python's parser is used, because pydantic's parser rejects surrogate escapes (`\udcff`),
        # which stand for the bytes of file names that are not UTF-8.
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{str(path)!r} is not a clip's JSON: {error}",
            details={"path": str(path), "reason": str(error)},
        ) from error


def check_clip_metadata(values: object, fault: str) -> dict[str, Any]:
    """Check a clip's metadata, and return them with defaults for the optional fields.

    Args:
        values: Untrusted value, such as the result of `parse_clip_json`.
        fault: Text at the beginning of the error's message, such as "x.json is not a clip's JSON".

    Raises:
        InputError: A required field is missing, or a field has a wrong type or value.
    """
    if not isinstance(values, dict):
        raise InputError(f"{fault}: the JSON is not an object")
    family = values.get("family")
    # Early versions of svdpp made only SVD clips and wrote no `family`, so SVD's schema does not
    # require this field. For an unknown family, SVD's schema is used too, because its error then
    # names `family` as the wrong field.
    is_known = isinstance(family, str) and family in SAMPLING_CLASSES
    model = _metadata_model(family if is_known else "svd")
    try:
        checked = model.model_validate(values)
        return checked.model_dump(exclude=_MAY_BE_MISSING - checked.model_fields_set)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{fault}: {where} {describe_fault(first)}".replace("\n", " "),
            details=fault_details(first),
        ) from error


def embedded_part(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a clip's metadata that is embedded in the video: all but `file_sha256`.

    The video cannot contain its own hash.
    """
    return {name: value for name, value in metadata.items() if name != "file_sha256"}


def recorded_sampling(metadata: Mapping[str, Any]) -> SamplingConfig:
    """Return the sampling parameters recorded in a clip's metadata.

    The metadata must have passed `check_clip_metadata`.
    """
    names = ("family", *sampling_fields(metadata["family"]))
    has_last_image = metadata.get("last_image_sha256") is not None
    given: dict[str, Any] = {"has_last_image": True} if has_last_image else {}
    if "references_sha256" in metadata:
        given["num_references"] = len(metadata["references_sha256"])
    return sampling_from({name: metadata[name] for name in names} | given)


def weights_identity(checkpoint: Checkpoint) -> object:
    """Return an identifier of a model's weights on this machine, which changes with the weights.

    Returns:
        For a hub model, the commit hash. For a model in a folder, a list with the path, size and
        modification time of each weight file. Components in other repositories are not included,
        because their commits are in the clip's metadata.
    """
    if checkpoint.revision:
        return checkpoint.revision
    folder = checkpoint.folder
    files = ((path, path.stat()) for path in sorted(folder.rglob("*.safetensors")))
    return [(str(path.relative_to(folder)), s.st_size, s.st_mtime_ns) for path, s in files]
