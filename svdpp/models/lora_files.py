"""Search for LoRA files, and checks of their tensors before any rank starts; imports no torch.

No tensor of a file is dropped silently. Ranks load the tensor, or the file is refused, or the
tensor is counted as ignored.
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

# diffusers' default name of LoRA files, used if the user names only a folder or a repository.
_LORA_FILE = "pytorch_lora_weights.safetensors"

#: Maximum number of clips' LoRAs that a rank keeps loaded for each denoiser: those of the current
#: clip, and some of earlier clips. If the current clip alone has more, all of its LoRAs are loaded.
#: LoRAs of the model itself are not counted, and always stay loaded. A small number saves memory,
#: because a LoRA takes 1 to 5 % of the denoiser's memory. But the number should be above 2, so that
#: LoRAs stay loaded while clips of several users alternate. A LoRA that is loaded but not active
#: does not slow down steps or change results.
CLIP_LORAS_KEPT = 4

#: Hint of errors about a LoRA whose tensors do not fit the model.
OTHER_MODEL_HINT = "use a LoRA that was trained for this model"

#: Key under which diffusers writes an adapter's config into the metadata of a safetensors file.
_ADAPTER_CONFIG = "lora_adapter_metadata"

# --- use of the tensors in a LoRA file -----------------------------------------------------------
#
#   tensor in the file                                use
#   blocks.0.self_attn.q.lora_A.weight, ...           loaded; diffusers renames it
#   blocks.0.self_attn.q.dora_scale                   the file is refused: unsupported by diffusers
#   blocks.0.cross_attn.k_img.lora_A.weight           ignored by a model without image encoder
#   text_encoder.layers.0.q_proj.lora_A.weight        ignored: only denoisers get LoRAs
#   blocks.0.norm3.diff                               ignored: diffusers does not load such tensors
#   any other tensor that fits no weight              the file is refused by the rank that loads it

#: Names of tensors in adapters that are not plain LoRAs, such as DoRA. A plain LoRA has two factors
#: for each weight, and adds their product to the weight.
_OTHER_ADAPTERS = re.compile(r"(dora_scale|lora_magnitude_vector|hada_w\d|lokr_w\d|oft_|boft_)")
#: Names of tensors that change a text encoder (`_TEXT_ENCODER`), or a denoiser's layers for an
#: image embedding (`_IMAGE_PART`). Tensors for text encoders are ignored, because ranks load LoRAs
#: only into denoisers. Tensors for image layers are ignored if the denoiser has no such layers.
_TEXT_ENCODER = re.compile(r"^(lora_)?(text_encoder|te\d?)(_\d)?[._]")
_IMAGE_PART = re.compile(r"(k_img|v_img|img_emb|add_k_proj|add_v_proj|image_embedder)")
#: Names of tensors that change normalisation layers. They count as ignored, because diffusers drops
#: them when it loads a LoRA for Wan (`_convert_non_diffusers_wan_lora_to_diffusers`).
_NORM_CHANGE = re.compile(r"norm\w*\.(diff|diff_b)$")
#: Names of tensors that change Wan's time projection. If a file changes only the projection's bias,
#: and not its weight, diffusers drops the tensors for the bias, so they count as ignored.
_TIME_PROJECTION = re.compile(r"time_projection")
#: Names of the two factors (down, up) of a weight change, in the formats of different programs.
_FACTORS = (("lora_A", "lora_B"), ("lora_down", "lora_up"), ("lora.down", "lora.up"))


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """LoRA file that has been found and checked, with the LoRA that was requested."""

    lora: Lora
    """Requested LoRA, completed with the file's SHA-256 and absolute path (or commit on the
    hub)."""
    path: Path
    ignored: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Number of ignored tensors in the file, by the part of the model that they would change, such
    as `k_img`. Empty: no tensor is ignored."""

    def with_weight(self, weight: float) -> LoraFile:
        """Return a copy of this LoRA file with another weight for the LoRA."""
        return replace(self, lora=replace(self.lora, weight=weight))

    @property
    def part(self) -> str:
        """Component name of the denoiser that the LoRA file changes."""
        return self.lora.part

    @property
    def identity(self) -> str:
        """Text that identifies the effect of a LoRA: file hash, weight and denoiser."""
        assert self.lora.sha256 is not None
        weight = f"{self.lora.weight:g}"
        if float(weight) != self.lora.weight:
            weight = repr(self.lora.weight)  # the format `g` would round to six digits
        return f"{self.lora.sha256[:16]}:{weight}:{self.part}"

    @property
    def remark(self) -> str:
        """Sentence about the ignored tensors of the LoRA file; empty if no tensor is ignored."""
        if not self.ignored:
            return ""
        parts = ", ".join(f"{part} ({count})" for part, count in self.ignored.items())
        total = sum(self.ignored.values())
        noun = "tensor is" if total == 1 else "tensors are"
        return (
            f"{display_name(self.path.name)}: {total} {noun} ignored, because the model takes "
            f"no such tensors: {parts}"
        )


def ignored_part(key: str, checkpoint: Any, has_time_weight: bool = True) -> str | None:
    """Return the model part that an ignored LoRA tensor would change; None if it is not ignored.

    The part is a short text for messages, such as `k_img` or `adapter of a text encoder`.

    Args:
        key: Name of the tensor in the file.
        checkpoint: Checked checkpoint of the model that gets the LoRA.
        has_time_weight: Whether the file changes the weight of Wan's time projection. False: it
            changes only the bias, or neither.
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
    """Return the ignored tensors of a LoRA file: the model part of each, by tensor name.

    Args:
        path: Path of the LoRA file.
        checkpoint: Checkpoint of the model that gets the LoRA.

    Raises:
        ModelError: The file cannot be read.
    """
    names = read_safetensors_header(path)[1]
    has_weight = any(_TIME_PROJECTION.search(each) and each.endswith(".weight") for each in names)
    parts = {name: ignored_part(name, checkpoint, has_weight) for name in names}
    return {name: part for name, part in parts.items() if part is not None}


def check_tensors(path: Path, checkpoint: Any) -> dict[str, int]:
    """Check that a LoRA file's tensors form pairs that diffusers can load; count ignored tensors.

    Returns:
        Number of ignored tensors, by model part.

    Raises:
        ModelError: The file has a tensor of an adapter that is not a LoRA, only one factor of a
            pair, or a pair of factors whose shapes do not fit together. Or all tensors are for
            parts that the model lacks. Or the adapter's config sets dropout.
    """
    header, entries = read_safetensors_header(path)
    _check_dropout(json.loads(header).get("__metadata__", {}))
    ignored = ignored_tensors(path, checkpoint)
    for name in sorted(entries.keys() - ignored):
        if found := _OTHER_ADAPTERS.search(name):
            raise ModelError(
                f"the tensor {short_repr(name)} is of an adapter that is not a plain LoRA "
                f"({found[0]}), which diffusers' video pipelines do not load",
                "use a plain LoRA, or merge the adapter into the model's weights",
                details={"tensor": name},
            )
        _check_pair(name, entries)
    if entries.keys() <= ignored.keys():
        raise ModelError("no tensor in the file is for a part that the model has", OTHER_MODEL_HINT)
    return dict(Counter(ignored.values()))


def _check_dropout(metadata: Mapping[str, str]) -> None:
    """Raise a `ModelError` if the adapter config in a LoRA file sets dropout.

    Training scripts write the adapter's config into the file. diffusers would apply the dropout at
    inference too, and clips would not be reproducible.
    """
    try:
        config = json.loads(metadata.get(_ADAPTER_CONFIG, "{}"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"the metadata {_ADAPTER_CONFIG} is not JSON") from error
    if not isinstance(config, dict):
        raise ModelError(f"the metadata {_ADAPTER_CONFIG} is not a JSON object")
    for name, value in config.items():
        if name.rpartition(".")[2] == "lora_dropout" and value:
            raise ModelError(
                f"the metadata set {short_repr(name)} to {short_repr(value)}: diffusers would drop "
                "random values in each step, and clips would not be reproducible",
                f"set the dropout to 0 in the file's metadata {_ADAPTER_CONFIG}",
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
                    f"the tensor {short_repr(partner)} is missing: it belongs to "
                    f"{short_repr(name)}",
                    "the file is incomplete: download or save it again",
                    details={"missing": partner, "tensor": name},
                )
            first, second = (name, partner) if own == down else (partner, name)
            # The first factor has the shape (r, in), and the second (out, r), with the same r (the
            # rank of the LoRA).
            if entries[first]["shape"][:1] != entries[second]["shape"][1:2]:
                raise ModelError(
                    f"the shapes of {short_repr(name)} and {short_repr(partner)} do not fit "
                    f"together: {entries[name]['shape']} and {entries[partner]['shape']}",
                    "the file is damaged: download or save it again",
                    details={
                        "tensor": name,
                        "shape": entries[name]["shape"],
                        "other": partner,
                        "other_shape": entries[partner]["shape"],
                    },
                )


# --- search for LoRA files -----------------------------------------------------------------------


def check_loras(loras: Collection[Lora], checkpoint: Any) -> None:
    """Check that a model can load the requested LoRAs, without looking at the files.

    Args:
        loras: Requested LoRAs.
        checkpoint: Checkpoint of the model, without weights.

    Raises:
        RequestError: The family loads no LoRAs, the model is quantised by TorchAO, or peft is not
            installed. Or the model has two experts, and a LoRA names none. Or the model has one
            denoiser, and a LoRA names an expert.
    """
    if not loras:
        return
    if not checkpoint.spec.loras:
        reason = (
            "diffusers' pipeline for it cannot load LoRAs"
            if checkpoint.spec.modular is None
            else "svdpp loads no LoRAs into modular pipelines"
        )
        raise RequestError(f"{checkpoint.label} takes no `loras`: {reason}", "leave `loras` out")
    if checkpoint.int8_denoisers:
        raise RequestError(
            f"{checkpoint.label} takes no `loras`: its weights are quantised by TorchAO",
            "use the original checkpoint, which is not quantised",
        )
    if importlib.util.find_spec("peft") is None:
        raise RequestError("`loras` needs the package peft", "pip install 'svdpp[lora]'")
    check_experts(loras, checkpoint)


def loras_in_folder(folder: Path, num_experts: int) -> tuple[Lora, ...]:
    """Return LoRAs for all safetensors files of a folder, sorted by file name.

    Args:
        folder: Folder, whose subfolders are not searched.
        num_experts: Number of denoisers of the model. 1: the result has one LoRA for each file. 2:
            the result has two LoRAs for each file, one for each expert, because a request may load
            the file into either expert.

    Raises:
        RequestError: The path is not a folder, or the folder has no safetensors file.
    """
    names = sorted(map(str, folder.glob("*.safetensors"))) if folder.is_dir() else []
    if not names:
        what = "has no *.safetensors files" if folder.is_dir() else "is not a folder"
        raise RequestError(
            f"`lora_dir` {display_name(str(folder))} {what}",
            "name a folder with the LoRA files that requests may use",
        )
    experts: tuple[Expert | None, ...] = ("high", "low") if num_experts == 2 else (None,)
    return tuple(Lora(name=name, expert=expert) for name in names for expert in experts)


def lora_stem(lora: Lora) -> str:
    """Return a LoRA's file name without folder and suffix: its name in HTTP requests."""
    return Path(lora.name).stem


def find_lora(lora: Lora, *, local_files_only: bool, checkpoint: Any = None) -> LoraFile:
    """Find the file of a LoRA, download it if it is on the hub, and check it.

    Args:
        lora: Requested LoRA.
        local_files_only: Whether only files on this machine are used.
        checkpoint: Checked checkpoint whose parts the file's tensors must match. None: only the
            format of the file is checked.

    Raises:
        ModelError: The file does not exist or is damaged, its SHA-256 is not the requested one, or
            its tensors are not those of a LoRA.
    """

    def check(path: Path) -> dict[str, int]:
        read_safetensors_header(path)  # refuses a damaged file before any rank starts
        return {} if checkpoint is None else check_tensors(path, checkpoint)

    found, path, ignored = find_file(
        lora, check, default=_LORA_FILE, local_files_only=local_files_only
    )
    return LoraFile(lora=found, path=path, ignored=ignored)


def lora_bytes(model: ModelConfig) -> int:
    """Return an estimate of the bytes of the LoRAs that a rank keeps loaded for one denoiser.

    The result is the size of all LoRAs of the model, plus that of the `CLIP_LORAS_KEPT` largest
    LoRAs that clips may use. A clip that itself has more LoRAs can need more memory. For a model
    with two experts, the sum is computed for each expert, and the larger sum is returned.

    Raises:
        ModelError: A file is missing or damaged.
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
