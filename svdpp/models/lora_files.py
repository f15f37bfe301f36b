"""Files of LoRAs, found, hashed and checked before any rank starts; imports no torch.

Each tensor of a file is either loaded by the ranks, or named here: refused, or listed as ignored.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from svdpp.config import Lora, ModelConfig
from svdpp.config.added_files import Expert
from svdpp.errors import ModelError, RequestError
from svdpp.models.added_files import check_experts, find_file
from svdpp.models.files import display_name, read_safetensors_header, short_repr

# Name of the file that diffusers writes; the default for a folder or a repository.
_LORA_FILE = "pytorch_lora_weights.safetensors"

#: LoRAs of clips that a rank keeps for each of its denoisers, loaded but not active. Few, because
#: each may take as much memory as 1 to 5 % of the denoiser; more than two, because requests of
#: several users alternate. An inactive LoRA costs no time in a step, and changes no bit.
CLIP_LORAS_KEPT = 4

#: Name of the metadata in a file with the configuration of the adapter, as diffusers writes it.
_ADAPTER_CONFIG = "lora_adapter_metadata"

# --- which tensors of a file are used ------------------------------------------------------------
#
#   name of a tensor in the file                      what becomes of it
#   blocks.0.self_attn.q.lora_A.weight, ...           loaded, by diffusers, under another name
#   blocks.0.self_attn.q.dora_scale                   the file is refused: diffusers would drop it
#   blocks.0.cross_attn.k_img.lora_A.weight           ignored by a model without image encoder
#   text_encoder.layers.0.q_proj.lora_A.weight        ignored: the pipelines load the denoiser's
#   blocks.0.norm3.diff                               ignored: diffusers does not load it
#   any other that the loaded model does not hold     the file is refused, by the rank that loads it

#: Kinds of adapters that are more than the product of two matrices.
_OTHER_ADAPTERS = re.compile(r"(dora_scale|lora_magnitude_vector|hada_w\d|lokr_w\d|oft_|boft_)")
#: Parts that a model may lack, by what tells them from others in the name of a tensor.
_TEXT_ENCODER = re.compile(r"^(lora_)?(text_encoder|te\d?)(_\d)?[._]")
_IMAGE_PART = re.compile(r"(k_img|v_img|img_emb|add_k_proj|add_v_proj|image_embedder)")
#: Changes of norms, and of a bias without its weight, which diffusers removes from files of Wan
#: (`_convert_non_diffusers_wan_lora_to_diffusers`).
_NORM_CHANGE = re.compile(r"norm\w*\.(diff|diff_b)$")
_TIME_PROJECTION = re.compile(r"time_projection")
#: The two factors of a change, as different programs name them.
_FACTORS = (("lora_A", "lora_B"), ("lora_down", "lora_up"), ("lora.down", "lora.up"))


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """A LoRA whose file has been found and checked."""

    lora: Lora
    """LoRA with the file's hash, and its absolute path or its commit on the hub."""
    path: Path
    ignored: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Number of tensors that the model has no place for, by the part that they are for."""

    def with_weight(self, weight: float) -> LoraFile:
        """Return the same LoRA with another weight."""
        return replace(self, lora=replace(self.lora, weight=weight))

    @property
    def part(self) -> str:
        """Name of the denoiser that it changes."""
        return self.lora.part

    @property
    def identity(self) -> str:
        """Text that is equal for equal effects, wherever the file is."""
        assert self.lora.sha256 is not None
        weight = f"{self.lora.weight:g}"
        if float(weight) != self.lora.weight:
            weight = repr(self.lora.weight)  # `g` has six digits
        return f"{self.lora.sha256[:16]}:{weight}:{self.part}"

    @property
    def remark(self) -> str:
        """A sentence about the tensors that are ignored; empty if there are none."""
        if not self.ignored:
            return ""
        parts = ", ".join(f"{part} ({count})" for part, count in self.ignored.items())
        total = sum(self.ignored.values())
        noun = "tensor is" if total == 1 else "tensors are"
        return (
            f"{display_name(self.path.name)}: {total} {noun} ignored, as the model has no {parts}"
        )


def ignored_part(key: str, checkpoint: Any, has_time_weight: bool = True) -> str | None:
    """Return the part that a tensor of a LoRA is for, if the model does not have it.

    Args:
        key: name of the tensor in the file.
        checkpoint: checked checkpoint.
        has_time_weight: whether the file has a weight, not only a bias, of Wan's time projection.
    """
    if _TEXT_ENCODER.search(key):
        return "adapter of a text encoder"
    if not checkpoint.spec.loras_as_wan:
        return None
    if not checkpoint.has_image_projection and (found := _IMAGE_PART.search(key)):
        return found[0]
    if _NORM_CHANGE.search(key):
        return "adapter of norms"
    if not has_time_weight and _TIME_PROJECTION.search(key):
        return "adapter of time_projection's bias alone"
    return None


def ignored_tensors(path: Path, checkpoint: Any) -> dict[str, str]:
    """Return the tensors of a LoRA's file that the model has no place for, with their parts.

    Raises:
        ModelError: the file cannot be read.
    """
    names = read_safetensors_header(path)[1]
    has_weight = any(_TIME_PROJECTION.search(each) and each.endswith(".weight") for each in names)
    parts = {name: ignored_part(name, checkpoint, has_weight) for name in names}
    return {name: part for name, part in parts.items() if part is not None}


def check_tensors(path: Path, checkpoint: Any) -> dict[str, int]:
    """Check that a LoRA's file holds whole pairs of factors and nothing that diffusers drops.

    Returns:
        The number of tensors that the model has no place for, by their parts.

    Raises:
        ModelError: a tensor is of another kind of adapter, misses its other factor, or has a shape
            that does not fit the other factor's; or all are for parts that the model does not have;
            or the file asks for dropout.
    """
    header, entries = read_safetensors_header(path)
    _check_dropout(json.loads(header).get("__metadata__", {}))
    ignored = ignored_tensors(path, checkpoint)
    for name in sorted(entries.keys() - ignored):
        if found := _OTHER_ADAPTERS.search(name):
            raise ModelError(
                f"the tensor {short_repr(name)} is of an adapter of another kind than LoRA "
                f"({found[0]}), which diffusers' video pipelines do not load",
                "use a plain LoRA, or merge the adapter into the model's weights",
                details={"tensor": name},
            )
        _check_pair(name, entries)
    if entries.keys() <= ignored.keys():
        raise ModelError("none of its tensors is for a part that the model has")
    return dict(Counter(ignored.values()))


def _check_dropout(metadata: Mapping[str, str]) -> None:
    """Raise ModelError if diffusers would set random values of the adapter to zero at each step.

    Scripts of training write the configuration of the adapter into the file. diffusers applies its
    dropout when a clip is made as well, so no two clips would be equal.
    """
    try:
        config = json.loads(metadata.get(_ADAPTER_CONFIG, "{}"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"its {_ADAPTER_CONFIG} is not JSON") from error
    if not isinstance(config, dict):
        raise ModelError(f"its {_ADAPTER_CONFIG} is not a JSON object")
    for name, value in config.items():
        if name.rpartition(".")[2] == "lora_dropout" and value:
            raise ModelError(
                f"its metadata set {short_repr(name)} to {short_repr(value)}: diffusers would drop "
                "random values in each step, and no two clips would be equal",
                f"set it to 0 in the file's {_ADAPTER_CONFIG}, or remove that",
                details={"name": name, "value": value},
            )


def _check_pair(name: str, entries: Mapping[str, Any]) -> None:
    for down, up in _FACTORS:
        for own, other in ((down, up), (up, down)):
            if not (re.search(rf"\.{re.escape(own)}\b", name) and name.endswith("weight")):
                continue
            partner = re.sub(rf"\.{re.escape(own)}\b", f".{other}", name)
            if partner not in entries:
                raise ModelError(
                    f"the tensor {short_repr(partner)} is missing; there is {short_repr(name)}",
                    "the file is incomplete: download or save it again",
                    details={"missing": partner, "tensor": name},
                )
            first, second = (name, partner) if own == down else (partner, name)
            if entries[first]["shape"][:1] != entries[second]["shape"][1:2]:  # the rank
                raise ModelError(
                    f"the shapes of {short_repr(name)} and {short_repr(partner)} do not fit: "
                    f"{entries[name]['shape']} and {entries[partner]['shape']}",
                    "the file is damaged: download or save it again",
                    details={
                        "tensor": name,
                        "shape": entries[name]["shape"],
                        "other": partner,
                        "other_shape": entries[partner]["shape"],
                    },
                )


# --- finding a file ------------------------------------------------------------------------------


def check_loras(loras: Collection[Lora], checkpoint: Any) -> None:
    """Check that a model can load LoRAs, before any file is looked for.

    Args:
        loras: LoRAs that are asked for.
        checkpoint: checkpoint of the model, without weights.

    Raises:
        RequestError: the family loads no LoRAs, peft is not installed, or the expert of a LoRA is
            missing or superfluous.
    """
    if not loras:
        return
    if not checkpoint.spec.loras:
        raise RequestError(
            f"{checkpoint.label} takes no `loras`: diffusers' pipeline for it cannot load one"
        )
    if importlib.util.find_spec("peft") is None:
        raise RequestError("`loras` needs the package peft", "pip install 'svdpp[lora]'")
    check_experts(loras, checkpoint)


def loras_in_folder(folder: Path, num_experts: int) -> tuple[Lora, ...]:
    """Return a LoRA for each safetensors file of a folder, and with two experts for each expert.

    Args:
        folder: Folder, whose subfolders are not searched.
        num_experts: Number of denoisers of the model. Each expert can load each file.

    Raises:
        RequestError: The path is not a folder, or the folder has no safetensors file.
    """
    names = sorted(map(str, folder.glob("*.safetensors"))) if folder.is_dir() else []
    if not names:
        what = "has no *.safetensors files" if folder.is_dir() else "is no folder"
        raise RequestError(
            f"`lora_dir` {display_name(str(folder))} {what}",
            "put the LoRAs that requests may name into it",
        )
    experts: tuple[Expert | None, ...] = ("high", "low") if num_experts == 2 else (None,)
    return tuple(Lora(name=name, expert=expert) for name in names for expert in experts)


def lora_stem(lora: Lora) -> str:
    """Return the name of a LoRA's file without folder and suffix, by which requests name it."""
    return Path(lora.name).stem


def find_lora(lora: Lora, *, local_files_only: bool, checkpoint: Any = None) -> LoraFile:
    """Find the file of a LoRA, and download it if it is on the hub.

    Args:
        lora: LoRA as it is asked for.
        local_files_only: whether nothing is downloaded.
        checkpoint: checked checkpoint whose parts the file's tensors are compared with; None: only
            the file itself is checked.

    Raises:
        ModelError: there is no such file, it is damaged, its hash is not the one that is asked for,
            or its tensors are not those of a LoRA.
    """

    def check(path: Path) -> dict[str, int]:
        read_safetensors_header(path)  # finds a damaged file before any rank starts
        return {} if checkpoint is None else check_tensors(path, checkpoint)

    found, path, ignored = find_file(
        lora, check, default=_LORA_FILE, local_files_only=local_files_only
    )
    return LoraFile(lora=found, path=path, ignored=ignored)


def lora_bytes(model: ModelConfig) -> int:
    """Return the bytes of a denoiser's LoRA files; of two experts, those of the one with more.

    They are the files of the model, and the largest ones of clips, as many as a rank keeps.

    Raises:
        ModelError: a file is missing or damaged.
    """

    def sizes(loras: Iterable[Lora], part: str) -> list[int]:
        own = [each for each in loras if each.part == part]
        files = (find_lora(each, local_files_only=model.local_files_only) for each in own)
        return sorted((file.path.stat().st_size for file in files), reverse=True)

    clip_loras = dict.fromkeys(each.source for each in model.clip_loras)
    return max(
        sum(sizes(model.loras, part)) + sum(sizes(clip_loras, part)[:CLIP_LORAS_KEPT])
        for part in ("transformer", "transformer_2")
    )
