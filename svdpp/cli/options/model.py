"""The options for the model and its sampler: weights, precision, steps, seeds, size, guidance."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from svdpp.cli.command import MODEL, PROMPTS, VIDEO
from svdpp.config import (
    DEFAULT_MODEL,
    DEMO_MODEL,
    DUMMY_MODEL,
    SAMPLING_CLASSES,
    Dtype,
    Fit,
    Lora,
    ModelConfig,
    PromptedSampling,
    SamplingConfig,
    SvdSampling,
    own_params,
    params_of,
    sampling_defaults,
)
from svdpp.config.limits import MAX_SEED, check_whole, require
from svdpp.errors import RequestError, nearest

if TYPE_CHECKING:
    from svdpp.models.checkpoint import Use

_MAX_SEEDS = 100_000
# Frames that --memory-opt decodes at a time: from diffusers' low-memory recipe for SVD.
_LOW_MEMORY_CHUNK = 2

#: Every parameter with an option of its own, by the name of its field.
_SHARED = {**params_of(PromptedSampling), **params_of(SvdSampling)}
#: The parameters that only families with prompts take.
PROMPT_FIELDS = ("guidance_scale", "max_sequence_length", "param")
#: The parameters, besides the seed, on which neither costs nor memory depend.
LOOKS = (
    *("fit", "fps", "motion_bucket_id", "noise_aug_strength"),
    *("min_guidance_scale", "max_guidance_scale"),
)


def _of(field: str, metavar: str = "", *aliases: str, shown: str = "") -> Any:
    """The option of a parameter, as its `Param` says."""
    param = _SHARED[field]
    is_prompted = field in PROMPT_FIELDS
    default = "the model's" if is_prompted or param.default is None else f"{param.default} for SVD"
    return (PROMPTS if is_prompted else VIDEO).setting(
        metavar or ("N" if param.kind is int else "X"),
        param.help,
        *dict.fromkeys((param.option, f"--{field.replace('_', '-')}", *aliases)),
        shown=shown or default,
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The weights, their precision, and the arguments of diffusers' `__call__`."""

    model: str = MODEL.setting(
        "MODEL",
        "A hub id, a diffusers folder, or demo: a small built-in stand-in for trials.",
        default=DEFAULT_MODEL,
    )
    as_family: str | None = MODEL.setting(
        "NAME", "Run the model by another family, such as wan_v2v.", "--family"
    )
    revision: str | None = MODEL.setting(
        "REV", "Branch, tag or commit of a hub model.", shown="its main branch"
    )
    variant: str | None = MODEL.setting("NAME", "Variant of the weights, such as fp16.")
    lora: list[str] | None = MODEL.setting(
        "FILE[:WEIGHT][:high|:low]",
        "A LoRA, repeatable: a safetensors file, or OWNER/NAME/FILE on the hub; of two experts, "
        "the one for high or low noise. Needs svdpp[lora].",
    )
    local_files_only: bool = MODEL.switch("Use only the hub cache; never download.")
    dtype: Dtype | None = MODEL.setting(
        "",
        "Precision of weights and latents.",
        shown="fp32 on the CPU; on CUDA fp16, for Wan and LTX-Video bf16",
    )
    memory_opt: bool = MODEL.switch(
        "Save memory at the cost of time: feed-forward in chunks, decode 2 frames at a time."
    )
    channels_last: bool = MODEL.switch(
        "Store weights of UNet and VAE in the memory format channels_last; bits differ."
    )
    deterministic: bool = MODEL.switch(
        "Use torch's deterministic algorithms and no TF32; without it torch keeps its settings, as "
        "in a plain diffusers script."
    )
    latent_shape: tuple[int, int, int, int, int] | None = MODEL.setting(
        "B C F H W",
        "Shape of the dummy model's latent: five sizes, each 1 or more.",
        shown="1 4 14 64 64; 1 4 2 8 8 with --time-scale",
    )
    steps: int | None = _of("num_inference_steps", "N", "--total-steps")
    num_frames: int | None = _of("num_frames", "F")
    decode_chunk_size: int | None = _of("decode_chunk_size", "F", shown="all")
    seed: int | None = VIDEO.setting(
        "N", "Seed of every clip, 0 to 2^63 - 1.", shown="0", between=(0, MAX_SEED)
    )
    height: int | None = _of("height", "PIXELS")
    width: int | None = _of("width", "PIXELS")
    fit: Fit = VIDEO.setting(
        "",
        "How to fit an image of another shape to the frame; diffusers stretches it.",
        default="stretch",
    )
    fps: int | None = _of("fps", "FPS")
    motion_bucket_id: int | None = _of("motion_bucket_id")
    noise_aug_strength: float | None = _of("noise_aug_strength")
    min_guidance_scale: float | None = _of("min_guidance_scale")
    max_guidance_scale: float | None = _of("max_guidance_scale")
    guidance_scale: float | None = _of("guidance_scale")
    max_sequence_length: int | None = _of("max_sequence_length")
    param: list[str] | None = PROMPTS.setting(
        "NAME=VALUE",
        "A parameter of the model's family, repeatable; svdpp models FAMILY lists them.",
    )

    @property
    def is_dummy(self) -> bool:
        """Whether this is the stand-in without weights."""
        return self.model == DUMMY_MODEL

    @property
    def family(self) -> str:
        """The model's family; reads its `model_index.json`, and may download it."""
        if self.as_family is None and self.model in (DEFAULT_MODEL, DEMO_MODEL, DUMMY_MODEL):
            return "svd"
        from svdpp.models.checkpoint import family_of_model  # light commands need it rarely

        return family_of_model(self.model_config("cpu"))

    @property
    def image_use(self) -> Use:
        """What clips of the model do with an image; reads its configs only if it takes prompts."""
        if self.family == "svd":
            return "needed"
        from svdpp.models.checkpoint import find_checkpoint

        return find_checkpoint(self.model_config("cpu"), weights=False).image_use

    @property
    def needs_image(self) -> bool:
        """Whether clips of the model need an image."""
        return self.image_use == "needed"

    def model_config(self, device: str, family: str | None = None, **more: Any) -> ModelConfig:
        """The configuration on `device`; the default precision is that of diffusers' examples."""
        default: Dtype = "fp32"
        if self.dtype is None and device.startswith("cuda"):
            default = "fp16" if (family or self.family) == "svd" else "bf16"
        names = ("revision", "variant", "local_files_only", "memory_opt", "channels_last")
        return ModelConfig(
            name=self.model,
            family=self.as_family,
            dtype=self.dtype or default,
            loras=tuple(map(_parse_lora, self.lora or ())),
            dummy_latent_shape=self.latent_shape,
            **{name: getattr(self, name) for name in names},
            **more,
        )

    def sampling_config(self, *, from_image: bool = True) -> SamplingConfig:
        """The given values, else the model's defaults, else those of diffusers."""
        family = self.family
        kind = SAMPLING_CLASSES[family]
        known = {field.name for field in fields(kind)}
        own = {**vars(self), "num_inference_steps": self.steps}
        if self.memory_opt and self.decode_chunk_size is None:
            own["decode_chunk_size"] = _LOW_MEMORY_CHUNK
        given = {name: own[name] for name in (*_SHARED, "fit") if own[name] is not None}
        given |= parse_params(self.param or (), family)
        for name in given.keys() - known:
            option = _SHARED[name].option
            wrong = f"{option} is not for {self.model}, a model of the family {family}"
            raise RequestError(wrong, f"leave {option} out")
        if "from_image" in known:
            given["from_image"] = from_image
        sampling: SamplingConfig = kind(**{**sampling_defaults(self.model), **given})
        return sampling


_LORA = re.compile(
    r"(?P<name>.+?)(:(?P<weight>[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?))?(:(?P<expert>high|low))?"
)


def _parse_lora(text: str) -> Lora:
    match = _LORA.fullmatch(text)
    if match is None:
        raise RequestError(f"--lora {text!r} is not FILE[:WEIGHT][:high|:low]")
    expert: Any = match["expert"]
    return Lora(name=match["name"], weight=float(match["weight"] or 1), expert=expert)


def parse_params(texts: Iterable[str], family: str) -> dict[str, float]:
    """The values of `--param NAME=VALUE` by name, in the types of the family's parameters."""
    known = own_params(SAMPLING_CLASSES[family])
    values: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        require(bool(equals), f"--param takes NAME=VALUE, got {text!r}")
        hint = nearest(name, known, f"svdpp models {family} lists them")
        require(name in known, f"the family {family} has no parameter {name!r}", hint)
        try:
            values[name] = known[name].kind(value)
        except ValueError:
            what = "a whole number" if known[name].kind is int else "a number"
            raise RequestError(f"--param {name} must be {what}, got {value!r}") from None
    return values


def parse_seeds(text: str) -> list[int]:
    """The seeds of `--seeds 1,3,5-7`."""
    seeds: dict[int, None] = {}  # a set that keeps its order
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,19})(?:-(\d{1,19}))?\s*", part, re.ASCII)
        if match is None:
            wrong = f"--seeds takes numbers and ranges such as 1-8 or 1,3,5-7, got {text!r}"
            raise RequestError(wrong)
        first, last = int(match[1]), int(match[2] or match[1])
        is_short = 0 <= last - first < _MAX_SEEDS and len(seeds) < _MAX_SEEDS
        require(is_short, f"--seeds {part.strip()}: ranges rise, to at most {_MAX_SEEDS} seeds")
        check_whole("a seed", last, 0, MAX_SEED)
        seeds.update(dict.fromkeys(range(first, last + 1)))
    return list(seeds)
