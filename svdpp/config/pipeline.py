"""Configuration of a pipeline, requests for clips, and the hashes that identify clips."""

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

from svdpp.config.added_files import Denoiser
from svdpp.config.demo_models import DEMO_MODELS
from svdpp.config.families.registry import (
    OPTION_PARAMS,
    SAMPLING_CLASSES,
    SamplingConfig,
    check_references,
    check_takes_last_image,
)
from svdpp.config.families.svd import SvdSampling
from svdpp.config.limits import (
    MAX_CUDA_INDEX,
    MAX_LATENT_ELEMENTS,
    MAX_PROMPT_CHARACTERS,
    MAX_SEED,
    MAX_STEPS,
    check_choice,
    check_int,
    check_seconds,
    check_type,
    max_threads,
    require,
    shown,
)
from svdpp.config.loras import Lora
from svdpp.config.sampling import extra_params
from svdpp.config.tolerance import Tolerance
from svdpp.errors import RequestError, nearest
from svdpp.plan.costs import CostModel
from svdpp.plan.layout import Layout, frame_chunks
from svdpp.plan.parallel import ParallelConfig, layout_fields, layout_options
from svdpp.plan.split import MAX_RANKS

_Config = TypeVar("_Config")
Dtype = Literal["fp32", "fp16", "bf16"]

DEFAULT_MODEL = "stabilityai/stable-video-diffusion-img2vid-xt"
DEMO_MODEL = "demo"
DUMMY_MODEL = "dummy"

# Number of frames that `memory_opt` decodes at once, as in diffusers' low-memory recipe for SVD.
_LOW_MEMORY_CHUNK = 2


def amp_error() -> RequestError:
    """Return the error for a request of automatic mixed precision, which svdpp does not support."""
    return RequestError(
        "amp is refused: automatic mixed precision is a tool of training, where a GradScaler "
        "scales the loss; in svdpp, autocast would choose a dtype for each kernel, so that no "
        "script of diffusers would give clips with the same bits",
        "use `dtype` fp16 or `dtype` bf16",
    )


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Shape and dtype of the latent that a rank expects to receive from another rank.

    Shape and dtype depend on the sampling parameters and on the step; see
    `EngineModel.latent_spec`.

    Raises:
        RequestError: The number of axes of `shape` differs from that of `dims`, a size is below 1,
            or the shape has more than `MAX_LATENT_ELEMENTS` elements.
    """

    shape: tuple[int, ...]
    """Size of each axis, in the order of the letters of `dims`."""
    dtype: Dtype = "fp32"
    dims: str = "BCFHW"
    """Axes, one letter each: B (batch), C (channels), F (frames), H, W, and N (one axis for all
    positions of all frames). The default is the order that Conv3d, and so the dummy model,
    requires."""

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
class ModelConfig:
    """Configuration of a pipeline's model: which one, and how it is loaded."""

    name: str = DEFAULT_MODEL
    """Model to load: a hub id, a folder in diffusers' format, the name of a demo model, or `dummy`
    (a small Conv3d with random weights)."""
    family: str | None = None
    """Family that runs the checkpoint, if several families can; None: the family of the pipeline
    class in `model_index.json`."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; None: the main branch."""
    component_revisions: tuple[tuple[str, str], ...] = ()
    """Pairs (component, commit) for a modular pipeline. The component is read at this commit
    instead of the revision in the model's index. Only components that the index takes from other
    repositories are affected."""
    variant: str | None = None
    """Variant of the weight files, such as fp16; None: the plain files, or for a component of a
    modular pipeline the variant that the model's index names."""
    local_files_only: bool = False
    """Whether only files on this machine are used, so that nothing is downloaded."""
    dtype: Dtype = "fp32"
    memory_opt: bool = False
    """Whether the UNet runs its feed-forward layers in chunks, and the VAE by default decodes 2
    frames at once (`decode_chunk_size`). This needs less memory, is slower, and changes the bits of
    clips."""
    channels_last: bool = False
    """Whether UNet and VAE use the memory format channels_last, which changes the bits of clips."""
    vae_tiling: bool = False
    """Whether the VAE encodes and decodes each frame in overlapping tiles, as after diffusers'
    `vae.enable_tiling()`. This needs less memory, is slower, and changes the bits of clips."""
    loras: tuple[Lora, ...] = ()
    """LoRAs for all clips, which are added to the denoiser in this order."""
    clip_loras: tuple[Lora, ...] = ()
    """Further LoRAs, which only some of the clips use. Before the ranks start, the files are
    checked and their memory is counted. The `weight` of LoRAs in this list is ignored, because each
    clip's request has its own weights (`ClipRequest.loras`). A request may also name LoRAs that are
    not in this list; they are checked when the request is submitted."""
    denoisers: tuple[Denoiser, ...] = ()
    """GGUF denoisers that replace the denoiser of the checkpoint. If the checkpoint has two experts
    (denoisers for high and for low noise), one or both of them are replaced."""
    attention_backend: str | None = None
    """Name of the attention backend with which diffusers runs the denoisers, such as `flash`. A
    backend changes the bits of clips. None: the default of diffusers, which is torch's own
    attention."""
    dummy_latent_shape: tuple[int, ...] | None = None
    """Shape (B, C, F, H, W) of the dummy model's latent. None: the shape of SVD's latent at 512
    pixels; if `dummy_sleeps`, a tiny shape, because the computation must be shorter than the
    sleep."""
    dummy_sleeps: bool = False
    """Whether the dummy model sleeps in each action, for as many seconds as the cost model
    (`PipelineConfig.costs`) says. With these sleeps, the dummy model also decodes clips; without
    them, it makes only latents."""

    def __post_init__(self) -> None:
        if self.dtype in ("amp", "autocast"):
            raise amp_error()
        check_choice("dtype", self.dtype, get_args(Dtype))
        check_type("model", self.name, str)
        require(
            bool(self.name.strip()),
            "`model` is empty",
            "name a model, such as `model` demo, which needs no download",
        )
        for name in ("family", "revision", "variant", "attention_backend"):
            check_type(name, getattr(self, name), str, type(None))
        loras = self.loras or self.clip_loras
        for name, given in (
            ("loras", loras),
            ("denoisers", self.denoisers),
            ("family", self.family),
            ("vae_tiling", self.vae_tiling),
            ("attention_backend", self.attention_backend),
        ):
            require(not (given and self.is_dummy), f"the dummy model takes no `{name}`")
        self.dummy_latent  # noqa: B018  checks the shape

    @property
    def dummy_latent(self) -> LatentSpec:
        """Shape and dtype of the dummy model's latent.

        Raises:
            RequestError: `dummy_latent_shape` is not a valid shape.
        """
        shape = self.dummy_latent_shape
        if shape is None:
            shape = (1, 4, 2, 8, 8) if self.dummy_sleeps else (1, 4, 14, 64, 64)
        return LatentSpec(shape=shape, dtype=self.dtype)

    @property
    def is_dummy(self) -> bool:
        """Whether this configuration names the dummy model, which has no weights to load."""
        return self.name == DUMMY_MODEL


def is_built_in(model: ModelConfig) -> bool:
    """Whether the model is SVD, `demo` or `dummy`, whose family is known without reading files."""
    return model.family is None and model.name in (DEFAULT_MODEL, DEMO_MODEL, DUMMY_MODEL)


def sampling_defaults(model_name: str) -> Mapping[str, Any]:
    """Return a demo model's own defaults of sampling parameters; empty for other models.

    Args:
        model_name: Name of the model, as in `ModelConfig.name`.
    """
    return DEMO_MODELS[model_name].sampling if model_name in DEMO_MODELS else {}


def sampling_of_model(
    model_name: str,
    family: str,
    values: Mapping[str, Any],
    *,
    from_image: bool = True,
    has_last_image: bool = False,
    num_references: int = 0,
    memory_opt: bool = False,
) -> SamplingConfig:
    """Return a model's sampling parameters: the given values, and defaults for all others.

    If the model has its own default for a parameter, the model's default is used in place of
    diffusers' default.

    Args:
        model_name: Name of the model.
        family: Family of the model.
        values: Values by field name; a value of None counts as not given.
        from_image: Whether clips start from an image; False: from text only. SVD ignores this
            argument, because its clips always start from an image.
        has_last_image: Whether an image for the last frame of each clip is given, too.
        num_references: Number of references of each clip, besides its input image.
        memory_opt: Whether 2 frames are decoded at once if `decode_chunk_size` is not given.

    Raises:
        RequestError: The family lacks a parameter, or a value is out of range.
    """
    kind = SAMPLING_CLASSES[family]
    names = {each.name for each in fields(kind)}
    given = {name: value for name, value in values.items() if value is not None}
    if memory_opt:
        given.setdefault("decode_chunk_size", _LOW_MEMORY_CHUNK)
    for name in given.keys() - names:
        if name not in OPTION_PARAMS:
            hint = nearest(name, extra_params(kind), f"svdpp models {family} lists the parameters")
            wrong = f"the family {family} has no parameter {name!r}"
            raise RequestError(wrong, hint, details={"family": family, "parameter": name})
        option = OPTION_PARAMS[name].option
        wrong = f"`{name}` is not for {model_name}, a model of the family {family}"
        details = {"option": option, "model": model_name, "family": family}
        raise RequestError(wrong, f"leave `{name}` out", details=details)
    if has_last_image:
        check_takes_last_image(family)
    check_references(family, num_references)
    if "from_image" in names:
        given |= {"from_image": from_image, "has_last_image": has_last_image}
        given["num_references"] = num_references
    sampling: SamplingConfig = kind(**{**sampling_defaults(model_name), **given})
    return sampling


def _with_old_names(kind: type[_Config]) -> type[_Config]:
    """Add deprecated arguments and properties to `PipelineConfig`: the fields of `ParallelConfig`.

    Until svdpp 0.3, `PipelineConfig` itself had these fields, under the names of the command-line
    options. The arguments and properties will be removed with the next version.
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
    """Configuration of a pipeline: model, sampling parameters, and the ranks that run it."""

    world_size: int
    """Number of ranks (processes with one device each) that run the model."""
    model: ModelConfig = field(default_factory=ModelConfig)
    sampling: SamplingConfig = field(default_factory=SvdSampling)
    device: str = "cpu"
    """Device of the ranks: `cpu`, `cuda` (rank r runs on cuda:r), or one device for all ranks, such
    as `cuda:0`."""
    num_threads: int = 1
    """Number of torch's intra-op threads on a CPU. It applies to each rank, and to the run on one
    device with which `verify` compares clips. The bits of clips depend on this number."""
    timeout_seconds: float = 600.0
    """Seconds without progress after which a rank counts as stalled, and the run is aborted."""
    start_timeout_seconds: float = 600.0
    """Seconds within which all ranks must load the model and join the process group."""
    heartbeat_timeout_seconds: float = 15.0
    """Seconds without a heartbeat after which a rank counts as stalled."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Configuration of how the ranks share the work."""
    costs: CostModel = field(default_factory=CostModel)
    """Cost model: seconds of an encode, a step and a decode. Splits other than `uniform` use these
    times to divide the steps among the ranks."""
    expert_boundary: int | None = None
    """Number of steps that the high-noise expert (the first of two denoisers) runs. It is computed
    from the checkpoint when the configuration is resolved. None: not resolved yet, or the model has
    only one denoiser."""
    tiles: tuple[int, ...] = ()
    """Size of each tile of a clip's decode, in positions of the latent. The sizes are computed from
    the checkpoint when the configuration is resolved. Empty: not resolved yet, or ranks cannot
    share the tiles."""
    checksum: bool = False
    """Whether packets between ranks contain a CRC-32 of their tensors, which the receiver
    checks."""
    deterministic: bool = False
    """Whether torch uses only deterministic algorithms, in the ranks and in the run on one device
    with which `verify` compares clips; False: torch's default algorithms."""
    allow_mixed_devices: bool = False
    """Whether ranks may have different kinds of devices, or different versions of libraries. Clips
    are then not bitwise equal to those of a run on one device."""

    def __post_init__(self) -> None:
        check_int("world_size", self.world_size, 1, MAX_RANKS)
        self.layout  # noqa: B018  checks that the ranks can divide the steps
        check_int("num_threads", self.num_threads, 1, max_threads(), " on this machine")
        self._check_rounded_guidance()
        # The two ranks of a pair share each step and must compute the same bits, so they need equal
        # devices.
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
        # diffusers decides twice whether guidance is on, that is, whether the scale is above 1: in
        # the encode by a Python number, and in the loop by a tensor of the model's dtype. The two
        # decisions differ for a `max_guidance_scale` that is above 1, but rounds to 1 in the dtype.
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
        """Layout of the ranks: it says which rank runs which steps of a clip.

        Raises:
            RequestError: The steps cannot be split over the ranks, or fields contradict each other.
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
        """Sizes of the chunks or tiles in which a clip is decoded; empty: not known yet.

        The unit is frames for chunks, and positions of the latent for tiles.
        """
        if self.tiles:
            return self.tiles
        frames, size = self.sampling.num_frames, self.sampling.decode_chunk_size
        return frame_chunks(frames, size) if frames and size else ()

    @property
    def decodes(self) -> bool:
        """Whether clips are decoded to frames; the dummy model decodes only if `dummy_sleeps`."""
        return not self.model.is_dummy or self.model.dummy_sleeps

    def single_rank(self) -> PipelineConfig:
        """Return a copy of this `PipelineConfig` in which a single rank makes all clips."""
        return replace(self, world_size=1, parallel=ParallelConfig(), costs=CostModel())

    def data_parallel(self) -> PipelineConfig:
        """Return a copy of this `PipelineConfig` in which each rank makes whole clips."""
        return replace(self, parallel=ParallelConfig(data_parallel_size=self.world_size))


VideoFormat = Literal["mp4", "gif", "webp", "frames"]

#: Key of the input image in `ClipRequest.files`, or of the input video in video-to-video families.
IMAGE = "image"
#: Key of the last image (for the clip's last frame) in `ClipRequest.files`. Most pipelines have an
#: argument of this name.
LAST_IMAGE = "last_image"
#: Name of the field with the references of a clip.
REFERENCES = "references"


def reference_names(count: int) -> tuple[str, ...]:
    """Return the keys of a clip's references in `ClipRequest.files`: `reference_1` and so on.

    Args:
        count: Number of references besides the clip's input image.
    """
    return tuple(f"reference_{place}" for place in range(1, count + 1))


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Format and quality in which clips are written to files."""

    format: VideoFormat = "mp4"
    crf: int = 18
    """Constant rate factor of H.264, 0 (lossless) to 51."""

    def __post_init__(self) -> None:
        check_choice("format", self.format, get_args(VideoFormat))
        check_int("crf", self.crf, 0, 51)


#: Names of the fields of `Encoding`, which are also keys in the JSON of a clip.
ENCODING_FIELDS = tuple(each.name for each in fields(Encoding))


@dataclass(frozen=True, kw_only=True)
class OutputConfig(Encoding):
    """Path and encoding of the file to which a clip is written."""

    path: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type("path", self.path, str)

    @property
    def json_path(self) -> str:
        """Path of the JSON file with the clip's metadata, next to the clip's file."""
        return f"{self.path}.json"


@dataclass(frozen=True, kw_only=True)
class ClipRequest:
    """Request for one clip. The dummy model uses only the seed."""

    seed: int
    image: str | None = None
    """Path of the input image, or of the input video for video-to-video families; None: the clip is
    made from text alone."""
    last_image: str | None = None
    """Path of the image for the clip's last frame, in families that take a last image; None: no
    last image."""
    references: tuple[str, ...] = ()
    """Paths of the references: further images of what the clip shows, such as a person, besides the
    input image. The model gets the references in this order. Only some families take references."""
    prompt: str | None = None
    """Prompt; None: the model takes no prompt."""
    negative_prompt: str | None = None
    """Negative prompt; None: diffusers' default, which is empty."""
    image_sha256: str | None = None
    """SHA-256 of the input image in hex, computed when the image was checked; None: not checked
    yet."""
    last_image_sha256: str | None = None
    """SHA-256 of the last image in hex, computed when the image was checked; None: not checked
    yet."""
    references_sha256: tuple[str, ...] = ()
    """SHA-256 of each reference in hex, computed when the images were checked; empty: not checked
    yet."""
    videos: Mapping[str, str] = field(default_factory=dict)
    """Paths of further input videos, by name, for families that take them; see
    `CommonSampling.videos`."""
    videos_sha256: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each further video in hex, by name, computed when the videos were checked."""
    loras: tuple[Lora, ...] = ()
    """LoRAs only for this clip, which are added to the denoiser after the model's LoRAs."""
    output: OutputConfig | None = None
    """Path and encoding of the clip's file; None: no file is written, and the result contains only
    the clip's hashes."""
    latents_key: str | None = None
    """Name of the clip's latent checkpoints, which are files of a half-finished clip: the SHA-256,
    in hex, of everything on which the bits of the latent depend. None: no latent checkpoints are
    written."""
    sampling: SamplingConfig | None = None
    """Sampling parameters of this clip; None: the sampling parameters of the pipeline."""
    done_steps: int = 0
    """Number of finished steps in the latent checkpoint from which the clip resumes; 0: the clip
    starts from the beginning."""

    def __post_init__(self) -> None:
        check_int("seed", self.seed, 0, MAX_SEED)
        check_prompt("prompt", self.prompt)
        check_prompt("negative_prompt", self.negative_prompt)
        check_int("done_steps", self.done_steps, 0, MAX_STEPS)
        images = ("image", "image_sha256", "last_image", "last_image_sha256")
        for name in (*images, "latents_key"):
            check_type(name, getattr(self, name), str, type(None))
        for name in ("references", "references_sha256"):
            check_type(name, getattr(self, name), tuple)
            for each in getattr(self, name):
                check_type(name, each, str)
        if self.done_steps and self.latents_key is None:
            raise ValueError("done_steps requires latents_key, which names the latent checkpoint")

    @property
    def files(self) -> dict[str, tuple[str, str | None]]:
        """Path of each input file of the clip, and its SHA-256 (None if unknown), by name."""
        images = {
            IMAGE: (self.image, self.image_sha256),
            LAST_IMAGE: (self.last_image, self.last_image_sha256),
        }
        given = {
            name: (path, sha256) for name, (path, sha256) in images.items() if path is not None
        }
        names = reference_names(len(self.references))
        checked = self.references_sha256 or (None,) * len(names)
        given |= zip(names, zip(self.references, checked, strict=True), strict=True)
        hashes = self.videos_sha256
        return given | {name: (path, hashes.get(name)) for name, path in self.videos.items()}


def check_prompt(name: str, text: object) -> None:
    """Raise a `RequestError` unless a field's value is a valid prompt, or None for no prompt.

    Args:
        name: Name of the field, such as `prompt`.
        text: Value of the field.

    Raises:
        RequestError: The prompt is not a text, is too long, or contains a NUL or a lone surrogate.
            Python reads a byte that is invalid in the locale's encoding as a lone surrogate.
    """
    check_type(name, text, str, type(None))
    if text is None:
        return
    require(
        len(str(text)) <= MAX_PROMPT_CHARACTERS and "\0" not in str(text),
        f"`{name}` must be a string of at most {MAX_PROMPT_CHARACTERS} characters",
        max_characters=MAX_PROMPT_CHARACTERS,
    )
    require(
        not any("\ud800" <= char <= "\udfff" for char in str(text)),
        f"`{name}` is not UTF-8, or the locale's encoding lacks its characters",
        "export LC_ALL=C.UTF-8, or put the prompt into a UTF-8 file: `prompts` FILE",
    )


#: Fields of a clip's JSON on which the bits of the latent depend, besides sampling parameters and
#: prompts. The number of ranks and the split of the steps do not change the bits.
_LATENT_IDENTITY = (
    *("input_sha256", "seed", "model", "revision", "weights_fingerprint", "variant", "dtype"),
    *("memory_opt", "channels_last", "device", "num_threads", "deterministic"),
)


#: Key of an entry in a rank's conditions, which are all facts on which the bits of clips depend
#: (see `worker.device.conditions_of`). The entry says whether the attention backend gave equal bits
#: for equal inputs. It is missing if no `attention_backend` is set. Each rank measures the
#: value, so it may differ even between ranks with equal devices.
ATTENTION_REPEATS = "attention_repeats"


def repeats_bits(conditions: Mapping[str, Any]) -> bool:
    """Whether the attention backend gave equal bits for equal inputs when a rank tried it.

    Args:
        conditions: Conditions of the rank or the clip; see `worker.device.conditions_of`.
    """
    return conditions.get(ATTENTION_REPEATS) is not False


def identity_fields(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the JSON fields that identify a clip: equal values mean equal clips.

    Args:
        metadata: JSON of a clip.
    """
    return (*_latent_identity(metadata), *ENCODING_FIELDS)


def _latent_identity(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the JSON fields on which the bits of a clip's final latent depend."""
    family = metadata["family"]
    # If the two ranks of a pair each compute half of a batch, they may round differently than one
    # rank, so the bits depend on `cfg_parallel`. The JSON marks clips of such pairs as unproven.
    # Clips of mixed devices are also unproven, but `cfg_parallel` is 1 for mixed devices. The
    # other unproven clips of pairs are those of an attention backend that does not repeat its bits.
    # For these, `cfg_parallel` is included as well, although it does not change the bits.
    in_halves = metadata.get("cfg_parallel", 1) > 1 and metadata.get("exact") == "unproven"
    common = (*_LATENT_IDENTITY, *(["cfg_parallel"] if in_halves else []))
    # A clip's JSON may lack these fields, for example if svdpp 0.3 has written the JSON. Missing
    # fields are left out.
    optional = (
        *("components", "lora", "denoiser", "attention_backend"),
        *("last_image_sha256", "references_sha256", "vae_tiling"),
    )
    added = tuple(name for name in optional if name in metadata)
    if family == "svd":  # the field `family` is left out, because the JSON of svdpp 0.3 lacks it
        return (*common, *sampling_fields(family))
    videos = ("videos_sha256",) if SAMPLING_CLASSES[family].videos else ()
    prompts = ("prompt", "negative_prompt")
    return (*common, *added, *videos, "family", *prompts, *sampling_fields(family))


@cache
def configuration_fields() -> frozenset[str]:
    """Return the names of all configuration fields.

    Error messages put these names in backticks, so that the command line and the server can replace
    them by the names of options and of request fields.
    """
    kinds: tuple[Any, ...] = (
        *(PipelineConfig, ModelConfig, CostModel, ClipRequest, OutputConfig, Tolerance),
        *SAMPLING_CLASSES.values(),
    )
    chosen = {option.name for option in layout_options().values()}
    return frozenset(each.name for kind in kinds for each in fields(kind)) | chosen - {"parallel"}


@cache
def sampling_fields(family: str) -> tuple[str, ...]:
    """Return the names of a family's sampling parameters in a clip's JSON, without `family`.

    The JSON lacks `has_last_image` and `num_references`, because it has a hash of each image.
    """
    names = (field.name for field in fields(SAMPLING_CLASSES[family]))
    known = ("family", "has_last_image", "num_references")
    return tuple(name for name in names if name not in known)


def parameters_sha256(metadata: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of the JSON fields that identify a clip.

    Args:
        metadata: JSON of a clip.
    """
    return _sha256({name: metadata[name] for name in identity_fields(metadata)})


def latents_key(metadata: Mapping[str, Any], weights: object) -> str:
    """Return the name of a clip's latent checkpoints: 64 hex digits, equal for equal latents.

    Args:
        metadata: JSON of the clip.
        weights: Identity of the weights; see `driver.clip_metadata.weights_identity`.
    """
    versions = {name: each for name, each in metadata["versions"].items() if name != "svdpp"}
    values = {name: metadata[name] for name in _latent_identity(metadata)}
    return _sha256({**values, "versions": versions, "weights": weights})


def _sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
