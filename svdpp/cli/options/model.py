"""The options for the model: its weights, their source and their precision."""

import re
from dataclasses import dataclass
from typing import Any

import click

from svdpp.cli.options.declare import MODEL, setting, switch
from svdpp.config import (
    DEFAULT_MODEL,
    DEMO_MODEL,
    DTYPE_BYTES,
    DUMMY_MODEL,
    Dtype,
    Lora,
    ModelConfig,
)
from svdpp.errors import RequestError

_DTYPES: dict[str, Dtype] = {
    "fp32": "fp32",
    "float32": "fp32",
    "fp16": "fp16",
    "float16": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
}


def _known_models(context: click.Context) -> list[str]:
    """Models that a shell completes; the dummy only for commands with `--latent-shape`."""
    takes_dummy = any(each.name == "latent_shape" for each in context.command.params)
    return [DEMO_MODEL, *([DUMMY_MODEL] if takes_dummy else []), DEFAULT_MODEL]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The weights and their precision."""

    model: str = setting(
        MODEL,
        "MODEL",
        "A hub id, a diffusers folder, or demo: a small built-in stand-in for trials.",
        default=DEFAULT_MODEL,
        choices=_known_models,
    )
    as_family: str | None = setting(
        MODEL,
        "NAME",
        "Run the model by another family, such as wan_v2v.",
        "--family",
    )
    revision: str | None = setting(
        MODEL, "REV", "Branch, tag or commit of a hub model.", shown="its main branch"
    )
    variant: str | None = setting(MODEL, "NAME", "Variant of the weights, such as fp16.")
    lora: list[str] | None = setting(
        MODEL,
        "FILE[:WEIGHT][:high|:low]",
        "A LoRA, repeatable: a safetensors file, or OWNER/NAME/FILE on the hub; of two experts, "
        "the one for high or low noise. Needs svdpp[lora].",
    )
    local_files_only: bool = switch(MODEL, "Use only the hub cache; never download.")
    dtype: str | None = setting(
        MODEL,
        "fp32|fp16|bf16",
        "Precision of weights and latents.",
        shown="fp32 on the CPU; on CUDA fp16, for Wan and LTX-Video bf16",
        choices=tuple(DTYPE_BYTES),
    )
    memory_opt: bool = switch(
        MODEL, "Save memory at the cost of time: feed-forward in chunks, decode 2 frames at a time."
    )
    channels_last: bool = switch(
        MODEL, "Store weights of UNet and VAE in the memory format channels_last; bits differ."
    )
    deterministic: bool = switch(
        MODEL,
        "Use torch's deterministic algorithms and no TF32, in ranks and proof. Without "
        "it torch keeps its own settings, as in a plain diffusers script on the same "
        "device.",
    )
    latent_shape: tuple[int, int, int, int, int] | None = setting(
        MODEL,
        "B C F H W",
        "Shape of the dummy model's latent: five sizes, each 1 or more.",
        shown="1 4 14 64 64; 1 4 2 8 8 with --time-scale",
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

        return family_of_model(self.to_config("cpu"))

    def to_config(self, device: str, family: str | None = None, **more: bool) -> ModelConfig:
        """The configuration on `device`."""
        return ModelConfig(
            name=self.model,
            family=self.as_family,
            revision=self.revision,
            variant=self.variant,
            local_files_only=self.local_files_only,
            dtype=self._dtype_on(device, family),
            memory_opt=self.memory_opt,
            channels_last=self.channels_last,
            loras=tuple(map(_parse_lora, self.lora or ())),
            dummy_latent_shape=self.latent_shape,
            **more,
        )

    def _dtype_on(self, device: str, family: str | None) -> Dtype:
        """The precision; by default the one of diffusers' own examples on CUDA."""
        if self.dtype is None and not device.startswith("cuda"):
            return "fp32"
        if self.dtype is None:
            return "fp16" if (family or self.family) == "svd" else "bf16"
        if self.dtype not in _DTYPES:
            raise RequestError(
                f"--dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}"
            )
        return _DTYPES[self.dtype]


_LORA = re.compile(
    r"(?P<name>.+?)(:(?P<weight>[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?))?(:(?P<expert>high|low))?"
)


def _parse_lora(text: str) -> Lora:
    match = _LORA.fullmatch(text)
    if match is None:
        raise RequestError(f"--lora {text!r} is not FILE[:WEIGHT][:high|:low]")
    expert: Any = match["expert"]
    return Lora(name=match["name"], weight=float(match["weight"] or 1), expert=expert)
