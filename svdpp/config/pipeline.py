"""Requests of a run: model, sampler and ranks, and its clips with what identifies them."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from operator import attrgetter
from typing import Any, Literal, TypeVar, get_args

from svdpp.config.demo_models import DEMO_MODELS
from svdpp.config.families.registry import OPTION_PARAMS, SAMPLING_CLASSES, SamplingConfig
from svdpp.config.families.svd import SvdSampling
from svdpp.config.limits import (
    MAX_CUDA_INDEX,
    MAX_LATENT_ELEMENTS,
    MAX_LORA_WEIGHT,
    MAX_PROMPT_CHARACTERS,
    MAX_SEED,
    MAX_STEPS,
    check_choice,
    check_int,
    check_seconds,
    check_type,
    detail_value,
    is_number,
    max_threads,
    require,
    shown,
)
from svdpp.config.sampling import extra_params
from svdpp.config.tolerance import Tolerance
from svdpp.errors import RequestError, nearest
from svdpp.plan.costs import CostModel
from svdpp.plan.layout import Layout, frame_chunks
from svdpp.plan.parallel import ParallelConfig, layout_fields, layout_options
from svdpp.plan.split import MAX_RANKS

_Config = TypeVar("_Config")
Dtype = Literal["fp32", "fp16", "bf16"]
#: One of two experts: of the steps with high noise, which come first, or with low noise.
Expert = Literal["high", "low"]

DEFAULT_MODEL = "stabilityai/stable-video-diffusion-img2vid-xt"
DEMO_MODEL = "demo"
DUMMY_MODEL = "dummy"

# Frames that `memory_opt` decodes at a time: from diffusers' low-memory recipe for SVD.
_LOW_MEMORY_CHUNK = 2


def amp_error() -> RequestError:
    """Return the refusal of automatic mixed precision, with its reason."""
    return RequestError(
        "amp is refused: automatic mixed precision is a tool of training, where a GradScaler "
        "scales the loss; here its autocast would choose a dtype for each kernel, and no script of "
        "diffusers would give the same bits",
        "use `dtype` fp16 or `dtype` bf16",
    )


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Shape and dtype of a clip's latent, which the receiver of a packet expects.

    The model gives it for a clip's sampling parameters and step: see `EngineModel.latent_spec`.

    Raises:
        RequestError: The shape has another number of axes than `dims`, a size below 1, or more
            elements than `MAX_LATENT_ELEMENTS`.
    """

    shape: tuple[int, ...]
    """Sizes in the order of `dims`."""
    dtype: Dtype = "fp32"
    dims: str = "BCFHW"
    """One letter for each axis: B (batch), C (channels), F (frames), H, W; N: all positions of all
    frames. The dummy model's order is the default, because Conv3d requires it."""

    def __post_init__(self) -> None:
        named = f"latent shape {' '.join(map(shown, self.shape))}"
        sizes, order = len(self.dims), " ".join(self.dims)
        is_shape = len(self.shape) == sizes and all(type(n) is int and n > 0 for n in self.shape)
        wrong = f"{named} needs {sizes} positive sizes, in the order {order}"
        require(is_shape, wrong, shape=list(self.shape), sizes=sizes)
        require(
            math.prod(self.shape) <= MAX_LATENT_ELEMENTS,
            f"{named} has more than {MAX_LATENT_ELEMENTS} elements",
            shape=list(self.shape),
            max_elements=MAX_LATENT_ELEMENTS,
        )


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A LoRA, and the weight with which it is added to the denoiser."""

    name: str
    """A safetensors file, or `OWNER/NAME/PATH` of one on the hub."""
    weight: float = 1.0
    expert: Expert | None = None
    """Which of two experts it is for; None if the model has one."""
    revision: str | None = None
    """Commit of a file on the hub; None: its main branch."""
    sha256: str | None = None
    """SHA-256 of the file, if another one is to be refused."""

    def __post_init__(self) -> None:
        check_type("loras", self.name, str)
        require(bool(self.name.strip()), "`loras` is empty", "name a safetensors file")
        require(
            is_number(self.weight) and abs(self.weight) <= MAX_LORA_WEIGHT,
            f"the weight of `loras` must be -{MAX_LORA_WEIGHT:g} to {MAX_LORA_WEIGHT:g}, got "
            f"{shown(self.weight)}",
            lora=self.name,
            weight=detail_value(self.weight),
            lowest=-MAX_LORA_WEIGHT,
            highest=MAX_LORA_WEIGHT,
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The weights and their precision."""

    name: str = DEFAULT_MODEL
    """A hub id, a diffusers folder, one of `DEMO_MODELS`, or `dummy` (a small random Conv3d)."""
    family: str | None = None
    """Family as which to run a checkpoint that several can run; None: that of its own pipeline."""
    revision: str | None = None
    variant: str | None = None
    local_files_only: bool = False
    dtype: Dtype = "fp32"
    memory_opt: bool = False
    """Feed-forward chunking in the UNet: needs less memory, is slower and changes the bits."""
    channels_last: bool = False
    """Weights of UNet and VAE in this memory format: changes the bits."""
    loras: tuple[Lora, ...] = ()
    """Added to the denoiser, in this order."""
    dummy_latent_shape: tuple[int, ...] | None = None
    """B C F H W. None: that of SVD at 512 pixels, or a tiny one if the dummy sleeps, because its
    computation must fit in the time of its sleep."""
    dummy_sleeps: bool = False
    """Whether the dummy model sleeps for the time of the pipeline's costs; then it also decodes."""

    def __post_init__(self) -> None:
        if self.dtype in ("amp", "autocast"):
            raise amp_error()
        check_choice("dtype", self.dtype, get_args(Dtype))
        check_type("model", self.name, str)
        require(bool(self.name.strip()), "`model` is empty", "`model` demo needs no download")
        for name in ("family", "revision", "variant"):
            check_type(name, getattr(self, name), str, type(None))
        for name, given in (("loras", self.loras), ("family", self.family)):
            require(not (given and self.is_dummy), f"the dummy model takes no `{name}`")
        self.dummy_latent  # noqa: B018  checks the shape

    @property
    def dummy_latent(self) -> LatentSpec:
        """Shape and dtype of the dummy model's latent.

        Raises:
            RequestError: `dummy_latent_shape` is no such shape.
        """
        shape = self.dummy_latent_shape
        if shape is None:
            shape = (1, 4, 2, 8, 8) if self.dummy_sleeps else (1, 4, 14, 64, 64)
        return LatentSpec(shape=shape, dtype=self.dtype)

    @property
    def is_dummy(self) -> bool:
        """Whether this is the dummy model, which has no weights to load."""
        return self.name == DUMMY_MODEL


def is_built_in(model: ModelConfig) -> bool:
    """Whether a model is known without a look at its files, and treated as SVD's."""
    return model.family is None and model.name in (DEFAULT_MODEL, DEMO_MODEL, DUMMY_MODEL)


def sampling_defaults(model_name: str) -> Mapping[str, Any]:
    """Return a model's defaults that differ from diffusers'; empty except for demo models."""
    return DEMO_MODELS[model_name].sampling if model_name in DEMO_MODELS else {}


def sampling_of_model(
    model_name: str,
    family: str,
    values: Mapping[str, Any],
    *,
    from_image: bool = True,
    memory_opt: bool = False,
) -> SamplingConfig:
    """Return the given sampling parameters, else the model's defaults, else those of diffusers.

    Args:
        model_name: Name of the model.
        family: Family of the model.
        values: Parameters by the names of their fields; None: not given.
        from_image: Whether clips start from an image, for families that need not.
        memory_opt: Whether memory is saved: few frames are then decoded at a time.

    Raises:
        RequestError: A parameter is not of the family, or out of range.
    """
    kind = SAMPLING_CLASSES[family]
    names = {each.name for each in fields(kind)}
    given = {name: value for name, value in values.items() if value is not None}
    if memory_opt:
        given.setdefault("decode_chunk_size", _LOW_MEMORY_CHUNK)
    for name in given.keys() - names:
        if name not in OPTION_PARAMS:
            hint = nearest(name, extra_params(kind), f"svdpp models {family} lists them")
            wrong = f"the family {family} has no parameter {name!r}"
            raise RequestError(wrong, hint, details={"family": family, "parameter": name})
        option = OPTION_PARAMS[name].option
        wrong = f"`{name}` is not for {model_name}, a model of the family {family}"
        details = {"option": option, "model": model_name, "family": family}
        raise RequestError(wrong, f"leave `{name}` out", details=details)
    if "from_image" in names:
        given["from_image"] = from_image
    sampling: SamplingConfig = kind(**{**sampling_defaults(model_name), **given})
    return sampling


def _with_old_names(kind: type[_Config]) -> type[_Config]:
    """Have a class take the fields of its `parallel` as arguments and attributes of their own.

    These were fields of `PipelineConfig` until 0.3, by the names of their options. Arguments warn;
    `dataclasses.replace` passes them on. To be removed with the next version.
    """
    new_init: Any = kind.__init__
    old_names = {option.name: name for name, option in layout_options().items()}

    def __init__(self: Any, **values: Any) -> None:
        given = {name: values.pop(name) for name in old_names if name in values}
        if given:
            text = f"pass parallel=ParallelConfig(...) in place of {', '.join(given)}"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            parallel = values.get("parallel", ParallelConfig())
            values["parallel"] = replace(parallel, **layout_fields(given))
        new_init(self, **values)

    kind.__init__ = functools.wraps(new_init)(__init__)  # type: ignore[method-assign]
    for old, name in old_names.items():
        setattr(kind, old, property(attrgetter(f"parallel.{name}")))
    return kind


@_with_old_names
@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """A pipeline: a model, the parameters of its sampler, and the ranks that share its steps."""

    world_size: int
    """Number of ranks W."""
    model: ModelConfig = field(default_factory=ModelConfig)
    sampling: SamplingConfig = field(default_factory=SvdSampling)
    device: str = "cpu"
    """`cpu`, `cuda` (rank r on cuda:r), or one device such as `cuda:0` shared by all ranks."""
    num_threads: int = 1
    """Intra-op threads of each CPU rank; the bits depend on it, so the reference uses the same."""
    timeout_seconds: float = 600.0
    """The run ends and names a rank that makes no progress for this long."""
    start_timeout_seconds: float = 600.0
    """Ranks must load their model and join within this time."""
    heartbeat_timeout_seconds: float = 15.0
    """A rank that sends no heartbeat for this long counts as stalled."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Layout of the ranks: how they share the work."""
    costs: CostModel = field(default_factory=CostModel)
    """The costs by which splits other than `uniform` cut."""
    expert_boundary: int | None = None
    """Steps of the first of two experts; the model gives it when the configuration is resolved."""
    checksum: bool = False
    """Whether packets carry a crc32 of their payload."""
    deterministic: bool = False
    """Use torch's deterministic algorithms in ranks and reference; False: torch's defaults."""
    allow_mixed_devices: bool = False
    """Whether ranks may differ in something that the bits depend on; clips are then not exact."""

    def __post_init__(self) -> None:
        check_int("world_size", self.world_size, 1, MAX_RANKS)
        self.layout  # noqa: B018  checks the ranks against the steps
        check_int("num_threads", self.num_threads, 1, max_threads(), " on this machine")
        self._check_rounded_guidance()
        # Both ranks of a pair go on from the same bits.
        wrong = "`cfg_parallel` 2 cannot be used with `allow_mixed_devices`"
        pair = self.parallel.cfg_parallel_size
        require(not (pair > 1 and self.allow_mixed_devices), wrong, cfg_parallel=pair)
        device = self.device if isinstance(self.device, str) else ""
        known = re.fullmatch(r"cpu|cuda(?::([0-9]{1,9}))?", device)
        wrong = f"`device` must be cpu, cuda or cuda:N, got {shown(self.device)}"
        is_device = known is not None and int(known[1] or 0) <= MAX_CUDA_INDEX
        require(is_device, wrong, device=shown(self.device), highest_index=MAX_CUDA_INDEX)
        check_seconds("timeout_seconds", self.timeout_seconds)
        check_seconds("start_timeout_seconds", self.start_timeout_seconds)
        check_seconds("heartbeat_timeout_seconds", self.heartbeat_timeout_seconds)

    def _check_rounded_guidance(self) -> None:
        # diffusers decides whether to guide from a Python number when it encodes, but from a tensor
        # of the model's dtype in its loop. A maximum that rounds to 1 would give two answers.
        dtype, highest = self.model.dtype, getattr(self.sampling, "max_guidance_scale", 0)
        rounding = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}[dtype]
        require(
            not 1 < highest <= 1 + rounding,
            f"`max_guidance_scale` {highest} rounds to 1 in {dtype}: diffusers cannot run that",
            "use `max_guidance_scale` 1 to run without guidance",
            max_guidance_scale=highest,
            rounded=1,
            dtype=dtype,
        )

    @cached_property
    def layout(self) -> Layout:
        """Layout of the ranks, which gives the route of each clip through them.

        Raises:
            RequestError: The ranks do not divide the steps, or the fields contradict each other.
        """
        return Layout.of(
            self.parallel,
            num_steps=self.sampling.num_inference_steps,
            world_size=self.world_size,
            costs=self.costs,
            decodes=self.decodes,
            chunks=self.chunks,
            expert_boundary=self.expert_boundary,
        )

    @property
    def chunks(self) -> tuple[int, ...]:
        """Number of frames of each part that is decoded at once; empty: not known yet."""
        frames, size = self.sampling.num_frames, self.sampling.decode_chunk_size
        return frame_chunks(frames, size) if frames and size else ()

    @property
    def decodes(self) -> bool:
        """Whether clips are decoded to frames; the dummy model does so only if it sleeps."""
        return not self.model.is_dummy or self.model.dummy_sleeps

    def single_rank(self) -> PipelineConfig:
        """Return the same configuration with one rank."""
        return replace(self, world_size=1, parallel=ParallelConfig(), costs=CostModel())

    def data_parallel(self) -> PipelineConfig:
        """Return the same configuration with whole clips on each rank."""
        return replace(self, parallel=ParallelConfig(data_parallel_size=self.world_size))


VideoFormat = Literal["mp4", "gif", "webp", "frames"]

#: Name of a clip's image, or of the video in its place, among its files.
IMAGE = "image"


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Path and encoding of one clip's file."""

    path: str
    format: VideoFormat = "mp4"
    crf: int = 18

    def __post_init__(self) -> None:
        check_type("path", self.path, str)
        check_choice("format", self.format, get_args(VideoFormat))
        check_int("crf", self.crf, 0, 51)

    @property
    def json_path(self) -> str:
        """Path of the clip's JSON: two formats of one clip have different ones."""
        return f"{self.path}.json"


@dataclass(frozen=True, kw_only=True)
class ClipRequest:
    """One clip: a seed, and an image or prompts; the dummy model uses only the seed."""

    seed: int
    image: str | None = None
    """Path of the image file."""
    prompt: str | None = None
    negative_prompt: str | None = None
    """Prompt of what to avoid; None: diffusers' default, the empty one."""
    image_sha256: str | None = None
    """SHA-256 of the file at the time of the check, in hex."""
    videos: Mapping[str, str] = field(default_factory=dict)
    """Paths of the further videos that the family takes, by name; see `CommonSampling.videos`."""
    videos_sha256: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of these files, by name, as `image_sha256`."""
    output: OutputConfig | None = None
    """File of the clip; None: no file is written; the result has only the hashes."""
    latents_key: str | None = None
    """SHA-256, in hex, of what the latent's bits depend on: the name of latent checkpoints."""
    sampling: SamplingConfig | None = None
    """Sampling parameters of this clip; None: the pipeline's."""
    done_steps: int = 0
    """Steps in the latent checkpoint of an earlier run; 0: no checkpoint."""

    def __post_init__(self) -> None:
        check_int("seed", self.seed, 0, MAX_SEED)
        check_prompt("prompt", self.prompt)
        check_prompt("negative_prompt", self.negative_prompt)
        check_int("done_steps", self.done_steps, 0, MAX_STEPS)
        for name in ("image", "image_sha256", "latents_key"):
            check_type(name, getattr(self, name), str, type(None))
        if self.done_steps and self.latents_key is None:
            raise ValueError("done_steps requires latents_key, which names the latent checkpoint")

    @property
    def files(self) -> dict[str, tuple[str, str | None]]:
        """Path and, if known, SHA-256 of all files that the clip is made from, by name."""
        image = {} if self.image is None else {IMAGE: (self.image, self.image_sha256)}
        hashes = self.videos_sha256
        return image | {name: (path, hashes.get(name)) for name, path in self.videos.items()}


def check_prompt(name: str, text: object) -> None:
    """Check that `text` is a prompt, or None for no prompt.

    Args:
        name: Name of the field, such as `prompt`.
        text: Value of the field.

    Raises:
        RequestError: It is no text, too long, or not Unicode. Python reads an argument's bytes that
            the locale's encoding lacks as lone surrogates, which no tokenizer takes.
    """
    check_type(name, text, str, type(None))
    if text is None:
        return
    require(
        len(str(text)) <= MAX_PROMPT_CHARACTERS and "\0" not in str(text),
        f"`{name}` must be a text of at most {MAX_PROMPT_CHARACTERS} characters",
        max_characters=MAX_PROMPT_CHARACTERS,
    )
    require(
        not any("\ud800" <= char <= "\udfff" for char in str(text)),
        f"`{name}` is not UTF-8, or the locale's encoding lacks its characters",
        "export LC_ALL=C.UTF-8, or put the prompt into a UTF-8 file: `prompts` FILE",
    )


#: Values that a latent's bits depend on, besides the sampling parameters and prompts of its family.
#: They do not depend on the number of ranks or the split.
_LATENT_IDENTITY = (
    *("input_sha256", "seed", "model", "revision", "weights_fingerprint", "variant", "dtype"),
    *("memory_opt", "channels_last", "device", "num_threads", "deterministic"),
)


def identity_fields(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the values that identify a clip: equal ones mean equal clips.

    Args:
        metadata: JSON of a clip.
    """
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
def configuration_fields() -> frozenset[str]:
    """Return the names of all fields of configurations, which errors name in backticks."""
    kinds: tuple[Any, ...] = (
        *(PipelineConfig, ModelConfig, CostModel, ClipRequest, OutputConfig, Tolerance),
        *SAMPLING_CLASSES.values(),
    )
    chosen = {option.name for option in layout_options().values()}
    return frozenset(each.name for kind in kinds for each in fields(kind)) | chosen - {"parallel"}


@cache
def sampling_fields(family: str) -> tuple[str, ...]:
    """Return the names of a family's sampling parameters."""
    names = (field.name for field in fields(SAMPLING_CLASSES[family]))
    return tuple(name for name in names if name != "family")


def parameters_sha256(metadata: Mapping[str, Any]) -> str:
    """Return the hash of the values that identify a clip, in hex: equal for equal clips.

    Args:
        metadata: JSON of a clip.
    """
    return _sha256({name: metadata[name] for name in identity_fields(metadata)})


def latents_key(metadata: Mapping[str, Any], weights: object) -> str:
    """Return the key of a clip's latent checkpoints, 64 hex digits: equal keys mean equal latents.

    Args:
        metadata: JSON of the clip.
        weights: Identity of the weights; see `driver.clip_metadata.weights_identity`.
    """
    versions = {name: each for name, each in metadata["versions"].items() if name != "svdpp"}
    values = {name: metadata[name] for name in _latent_identity(metadata)}
    return _sha256({**values, "versions": versions, "weights": weights})


def _sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
