"""Options of the model and its sampler: weights, precision, steps, seeds, size, guidance."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from svdpp.cli.options import complete
from svdpp.cli.options.declare import MODEL, PROMPTS, VIDEO, flag, option
from svdpp.config import (
    DEFAULT_MODEL,
    DEMO_MODEL,
    DUMMY_MODEL,
    OPTION_PARAMS,
    SAMPLING_CLASSES,
    Dtype,
    Fit,
    ModelConfig,
    SamplingConfig,
    extra_params,
    parse_denoiser,
    parse_loras,
    sampling_of_model,
)
from svdpp.config.limits import MAX_SEED, check_int, require
from svdpp.driver.request import default_dtype
from svdpp.errors import RequestError, nearest

if TYPE_CHECKING:
    from svdpp.models.checkpoint import Checkpoint, InputUse

_MAX_SEEDS = 100_000
#: Names of parameters that only families with prompts have.
PROMPT_FIELDS = ("guidance_scale", "max_sequence_length", "param")


def _param_option(name: str, metavar: str = "", *, default: str = "", **more: Any) -> Any:
    """Return the command-line option of a sampling parameter, as its `Param` describes it."""
    param = OPTION_PARAMS[name]
    if not default and param.default is not None and name not in PROMPT_FIELDS:
        default = f"{param.default} for SVD"
    return option(
        param.option,
        panel=PROMPTS if name in PROMPT_FIELDS else VIDEO,
        metavar=metavar or ("N" if param.kind is int else "X"),
        help=f"{param.help.rstrip('.')}; {default}." if default else param.help,
        **more,
    )


#: Annotation of `--model`, for commands that change its default.
ModelName = Annotated[
    str,
    option(
        panel=MODEL,
        metavar="MODEL",
        help="A hub id, a diffusers folder, demo or demo-text.",
        common=True,
        envvar="SVDPP_MODEL",
        show_envvar=False,
        autocompletion=complete.models,
    ),
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of the model, its precision, and its sampling parameters."""

    model: ModelName = DEFAULT_MODEL
    as_family: Annotated[
        str | None,
        option(
            "--family",
            panel=MODEL,
            metavar="NAME",
            help="Run the model with the pipeline of another family, such as wan_v2v.",
            autocompletion=complete.families,
        ),
    ] = None
    revision: Annotated[
        str | None,
        option(
            panel=MODEL,
            metavar="REV",
            help="Branch, tag or commit of a hub model.",
            show_default="its main branch",
        ),
    ] = None
    variant: Annotated[
        str | None,
        option(panel=MODEL, metavar="NAME", help="Variant of the weights, such as fp16."),
    ] = None
    lora: Annotated[
        list[str] | None,
        option(
            panel=MODEL,
            metavar="LORA",
            help="A LoRA, repeatable: FILE or OWNER/NAME/FILE, then :WEIGHT, :high or :low. Needs "
            "the pip extra lora.",
            common=True,
        ),
    ] = None
    denoiser: Annotated[
        list[str] | None,
        option(
            panel=MODEL,
            metavar="FILE.gguf",
            help="A quantised denoiser in place of the model's own: FILE.gguf or "
            "OWNER/NAME/FILE.gguf. If the model has two experts, add :high or :low. Needs the pip "
            "extra gguf.",
        ),
    ] = None
    attention_backend: Annotated[
        str | None,
        option(
            panel=MODEL,
            metavar="NAME",
            help="Attention backend of the denoisers, by its name in diffusers: native, flash, "
            "sage, _native_cudnn ...; changes the bits of clips. svdpp doctor lists the backends "
            "that work here.",
            show_default="native",
        ),
    ] = None
    local_files_only: Annotated[
        bool,
        flag("--local-files-only", panel=MODEL, help="Use only the hub cache; never download."),
    ] = False
    dtype: Annotated[
        Dtype | None,
        option(
            panel=MODEL,
            metavar="TYPE",
            help="Precision of weights and latents: fp32, fp16 or bf16.",
            show_default="fp32 on the CPU; on CUDA fp16 for SVD, else bf16",
        ),
    ] = None
    memory_opt: Annotated[
        bool,
        flag(
            "--memory-opt",
            panel=MODEL,
            help="Save memory at the cost of time: feed-forward in chunks, decode 2 frames at a "
            "time.",
        ),
    ] = False
    channels_last: Annotated[
        bool,
        flag(
            "--channels-last",
            panel=MODEL,
            help="Store weights of UNet and VAE in the memory format channels_last; changes the "
            "bits of clips.",
        ),
    ] = False
    vae_tiling: Annotated[
        bool,
        flag(
            "--vae-tiling",
            panel=MODEL,
            help="Encode and decode frames in overlapping tiles, as diffusers' "
            "vae.enable_tiling(), to save memory; slower, and changes the bits of clips. Not for "
            "SVD.",
        ),
    ] = False
    deterministic: Annotated[
        bool,
        flag(
            "--deterministic",
            panel=MODEL,
            help="Use torch's deterministic algorithms and no TF32; without it torch keeps its "
            "settings, as in a plain diffusers script.",
        ),
    ] = False
    latent_shape: Annotated[
        tuple[int, int, int, int, int] | None,
        option(
            panel=MODEL,
            metavar="B C F H W",
            help="Shape of the dummy model's latent: five sizes, each 1 or more.",
            show_default="1 4 14 64 64; 1 4 2 8 8 with --time-scale",
        ),
    ] = None
    steps: Annotated[int | None, _param_option("num_inference_steps", common=True)] = None
    num_frames: Annotated[int | None, _param_option("num_frames", "F", common=True)] = None
    decode_chunk_size: Annotated[
        int | None, _param_option("decode_chunk_size", "F", common=True)
    ] = None
    seed: Annotated[
        int | None,
        option(
            panel=VIDEO,
            metavar="N",
            help="Seed of every clip; 0 by default.",
            common=True,
        ),
    ] = None
    height: Annotated[int | None, _param_option("height", "N", common=True)] = None
    width: Annotated[int | None, _param_option("width", "N", common=True)] = None
    fit: Annotated[
        Fit,
        option(
            panel=VIDEO,
            metavar="HOW",
            help="Fit of an image: stretch, crop or pad.",
            show_default=False,
            common=True,
        ),
    ] = "stretch"
    fps: Annotated[float | None, _param_option("fps", "FPS", common=True)] = None
    motion_bucket_id: Annotated[int | None, _param_option("motion_bucket_id")] = None
    noise_aug_strength: Annotated[float | None, _param_option("noise_aug_strength")] = None
    min_guidance_scale: Annotated[float | None, _param_option("min_guidance_scale")] = None
    max_guidance_scale: Annotated[float | None, _param_option("max_guidance_scale")] = None
    guidance_scale: Annotated[float | None, _param_option("guidance_scale", common=True)] = None
    max_sequence_length: Annotated[int | None, _param_option("max_sequence_length")] = None
    param: Annotated[
        list[str] | None,
        option(
            panel=PROMPTS,
            metavar="NAME=VALUE",
            help="A parameter of the model's family, repeatable; svdpp models FAMILY lists them.",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.seed is not None:
            check_int("seed", self.seed, 0, MAX_SEED)

    @property
    def is_dummy(self) -> bool:
        """Whether the model that the options choose is the dummy model, which has no weights."""
        return self.model == DUMMY_MODEL

    @property
    def family(self) -> str:
        """Family of the model that the options choose, such as `wan`.

        The family is read from the model's configs, which are downloaded if necessary.
        """
        return "svd" if self.checkpoint is None else self.checkpoint.family

    @property
    def loaded_family(self) -> str | None:
        """Family whose classes the ranks import; None for the dummy model."""
        return None if self.is_dummy else self.family

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """Checkpoint of the model that the options choose, without weights; read only once.

        None for models that are known without reading files: the default, the demo, and the dummy.

        Raises:
            ModelError: The model does not exist, or svdpp does not run it.
            RequestError: The options contradict the checkpoint.
        """
        if self.as_family is None and self.model in (DEFAULT_MODEL, DEMO_MODEL, DUMMY_MODEL):
            return None
        # The module takes long to import, and quick commands rarely need it.
        from svdpp.models.checkpoint import find_checkpoint

        return find_checkpoint(self.model_config("cpu"), weights=False)

    @property
    def image_use(self) -> InputUse:
        """Whether clips of the chosen model need, may have, or must not have an image."""
        return "needed" if self.checkpoint is None else self.checkpoint.image_use

    @property
    def needs_image(self) -> bool:
        """Whether clips of the chosen model need an image."""
        return self.image_use == "needed"

    @property
    def last_image_use(self) -> InputUse:
        """Whether the chosen model's clips need, may have, or must not have a last image."""
        return "refused" if self.checkpoint is None else self.checkpoint.last_image_use

    @property
    def needs_last_image(self) -> bool:
        """Whether clips of the chosen model need a last image."""
        return self.last_image_use == "needed"

    def model_config(self, device: str, family: str | None = None, **more: Any) -> ModelConfig:
        """Convert the options to a `ModelConfig`.

        Args:
            device: `cpu`, `cuda` or `cuda:N`, on which the default precision depends.
            family: Family of the model; None: it is read from the model's configs if needed.
            more: Further fields of the configuration.

        Raises:
            RequestError: An option has an invalid value, or does not apply to the dummy model.
        """
        dtype = self.dtype
        if dtype is None:
            dtype = default_dtype(device, family or self.family) if device != "cpu" else "fp32"
        names = (
            *("revision", "variant", "local_files_only"),
            *("memory_opt", "channels_last", "vae_tiling"),
            "attention_backend",
        )
        return ModelConfig(
            name=self.model,
            family=self.as_family,
            dtype=dtype,
            loras=parse_loras(self.lora),
            denoisers=tuple(map(parse_denoiser, self.denoiser or ())),
            dummy_latent_shape=self.latent_shape,
            **{name: getattr(self, name) for name in names},
            **more,
        )

    def sampling_config(
        self,
        *,
        from_image: bool = True,
        has_last_image: bool | None = None,
        num_references: int = 0,
    ) -> SamplingConfig:
        """Return a clip's sampling parameters, from the options.

        Parameters without an option get the model's default, or else diffusers' default.

        Args:
            from_image: Whether clips start from an image, if the family also makes clips from text.
            has_last_image: Whether clips also end at an image; None: only if the model needs one.
            num_references: Number of reference images of each clip, besides its input image.

        Raises:
            RequestError: The model's family lacks a parameter, or a value is out of range.
        """
        values = {**vars(self), "num_inference_steps": self.steps}
        values = {name: values[name] for name in (*OPTION_PARAMS, "fit")}
        values |= parse_params(self.param or (), self.family)
        if has_last_image is None:
            has_last_image = self.needs_last_image
        return sampling_of_model(
            self.model,
            self.family,
            values,
            from_image=from_image,
            has_last_image=has_last_image,
            num_references=num_references,
            memory_opt=self.memory_opt,
        )


@dataclass(frozen=True, kw_only=True)
class WithoutAppearance(ModelOptions):
    """Model options without those that change only how clips look.

    Commands that use this group, such as `svdpp plan`, deal only with times and memory.
    """

    fit: Fit = "stretch"
    fps: float | None = None
    motion_bucket_id: int | None = None
    noise_aug_strength: float | None = None
    min_guidance_scale: float | None = None
    max_guidance_scale: float | None = None


def parse_params(texts: Iterable[str], family: str) -> dict[str, float]:
    """Parse the values of `--param NAME=VALUE` into numbers by name.

    Args:
        texts: Values of the option, one for each time that it is given.
        family: Family of the model.

    Returns:
        Values by name, in the types of the family's parameters.

    Raises:
        RequestError: A value is not NAME=VALUE, or the family lacks the parameter.
    """
    known = extra_params(SAMPLING_CLASSES[family])
    values: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        require(bool(equals), f"--param takes NAME=VALUE, got {text!r}", value=text)
        hint = nearest(name, known, f"svdpp models {family} lists them")
        wrong = f"the family {family} has no parameter {name!r}"
        require(name in known, wrong, hint, family=family, parameter=name)
        try:
            values[name] = known[name].kind(value)
        except ValueError:
            what = "a whole number" if known[name].kind is int else "a number"
            wrong = f"--param {name} must be {what}, got {value!r}"
            raise RequestError(wrong, details={"parameter": name, "value": value}) from None
    return values


def parse_seeds(text: str) -> list[int]:
    """Parse the value of `--seeds`, such as `1,3,5-7`, into a list of seeds.

    Args:
        text: Value of the option, such as `1,3,5-7`.

    Returns:
        Seeds in the given order, without duplicates.

    Raises:
        RequestError: The text is not a list of seeds and ranges, or has too many seeds.
    """
    seeds: dict[int, None] = {}  # a dictionary is used as an ordered set
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,19})(?:-(\d{1,19}))?\s*", part, re.ASCII)
        if match is None:
            wrong = f"--seeds takes numbers and ranges, got {text!r}"
            raise RequestError(
                wrong, "write seeds such as --seeds 1-8 or --seeds 1,3", details={"value": text}
            )
        first, last = int(match[1]), int(match[2] or match[1])
        empty = f"--seeds {first}-{last}: the range is empty"
        require(first <= last, empty, f"write {last}-{first}", first=first, last=last)
        is_short = last - first < _MAX_SEEDS and len(seeds) < _MAX_SEEDS
        too_many = f"--seeds {part.strip()}: at most {_MAX_SEEDS} seeds are taken"
        require(is_short, too_many, value=part.strip(), most=_MAX_SEEDS)
        check_int("seed", last, 0, MAX_SEED)
        seeds.update(dict.fromkeys(range(first, last + 1)))
    return list(seeds)
