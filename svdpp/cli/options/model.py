"""The options for the model: its weights, their source and their precision."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from svdpp.cli.options.declare import MODEL, completes
from svdpp.config import DEFAULT_MODEL, DEMO_MODEL, DUMMY_MODEL, Dtype, Lora, ModelConfig
from svdpp.errors import RequestError

if TYPE_CHECKING:
    from svdpp.models.checkpoint import Use


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The weights and their precision."""

    model: str = MODEL.setting(
        "MODEL",
        "A hub id, a diffusers folder, or demo: a small built-in stand-in for trials.",
        default=DEFAULT_MODEL,
        shell_complete=completes(DEMO_MODEL, DUMMY_MODEL, DEFAULT_MODEL),
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
        "Use torch's deterministic algorithms and no TF32, in ranks and proof; without it torch "
        "keeps its own settings, as in a plain diffusers script."
    )
    latent_shape: tuple[int, int, int, int, int] | None = MODEL.setting(
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
        same: dict[str, Any] = {name: getattr(self, name) for name in names}
        return ModelConfig(
            name=self.model,
            family=self.as_family,
            dtype=self.dtype or default,
            loras=tuple(map(_parse_lora, self.lora or ())),
            dummy_latent_shape=self.latent_shape,
            **same,
            **more,
        )


_LORA = re.compile(
    r"(?P<name>.+?)(:(?P<weight>[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?))?(:(?P<expert>high|low))?"
)


def _parse_lora(text: str) -> Lora:
    match = _LORA.fullmatch(text)
    if match is None:
        raise RequestError(f"--lora {text!r} is not FILE[:WEIGHT][:high|:low]")
    expert: Any = match["expert"]
    return Lora(name=match["name"], weight=float(match["weight"] or 1), expert=expert)
