"""LoRA files: finding them, checking them, and what identifies them; knows no torch."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from svdpp.config import Lora, ModelConfig
from svdpp.errors import ModelError, RequestError
from svdpp.models import hub
from svdpp.models.safetensors_header import read_safetensors_header

# What diffusers writes: the file of a folder, or of a repository, that is named alone.
_DEFAULT_FILE = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """A LoRA whose file has been found and checked."""

    lora: Lora
    """With the file's hash, and its absolute path or its commit on the hub."""
    path: Path

    @property
    def part(self) -> str:
        """The denoiser that it changes."""
        return "transformer_2" if self.lora.expert == "low" else "transformer"

    @property
    def identity(self) -> str:
        """What its effect depends on, wherever the file is."""
        assert self.lora.sha256 is not None
        return f"{self.lora.sha256[:16]}:{self.lora.weight:g}:{self.part}"


def check_loras(model: ModelConfig, checkpoint: Any) -> None:
    """Refuses LoRAs that a model cannot load, before any file is looked for."""
    if not model.loras:
        return
    label, two_experts = checkpoint.label, checkpoint.num_experts == 2
    if not checkpoint.row.loras:
        raise RequestError(f"{label} takes no --lora: diffusers' pipeline for it cannot load one")
    if importlib.util.find_spec("peft") is None:
        raise RequestError("--lora needs the package peft", "pip install 'svdpp[lora]'")
    for lora in model.loras:
        name = hub.show_name(lora.name)
        if two_experts == (lora.expert is None):
            experts = "two experts: say which" if two_experts else "one expert: say none"
            hint = "end it with :high or :low" if two_experts else f"leave out :{lora.expert}"
            raise RequestError(f"{label} has {experts} in --lora {name}", hint)


def find_lora(lora: Lora, *, local_files_only: bool) -> LoraFile:
    """The file of a LoRA, downloaded if it is on the hub."""
    name, path = hub.show_name(lora.name), Path(os.path.expanduser(lora.name))
    try:
        if path.exists():
            path = (path / _DEFAULT_FILE if path.is_dir() else path).resolve()
            found = replace(lora, name=str(path))
        else:
            path = _download(lora, local_files_only)
            commits = filter(None, map(hub.commit_of, path.parents))
            found = replace(lora, revision=next(commits, lora.revision))
        if path.suffix != ".safetensors":
            raise ModelError("only safetensors files are read", "convert it")
        read_safetensors_header(path)  # finds a damaged file before any rank starts
        status = path.stat()
        sha256 = _sha256(path, status.st_size, status.st_mtime_ns)
    except ModelError as error:
        raise ModelError(f"--lora {name}: {error.message}", error.hint) from error
    except OSError as error:
        raise ModelError(f"--lora {name} cannot be read ({error.strerror})") from error
    if lora.sha256 not in (None, sha256):
        raise ModelError(
            f"the LoRA {name} has changed since the clip was made",
            "restore it, or make the clip again: svdpp run --overwrite",
        )
    return LoraFile(lora=replace(found, sha256=sha256), path=path)


def lora_bytes(model: ModelConfig) -> int:
    """Bytes of a denoiser's LoRAs; of two experts, the one with more."""
    sizes: Counter[str] = Counter()
    for each in model.loras:
        file = find_lora(each, local_files_only=model.local_files_only)
        sizes[file.part] += file.path.stat().st_size
    return max(sizes.values(), default=0)


@functools.cache
def _sha256(path: Path, size: int, modified: int) -> str:
    """The hash of a file, computed once; `size` and `modified` are new if it is another one."""
    del size, modified
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(lora: Lora, local_files_only: bool) -> Path:
    """The file in the hub's cache."""
    from huggingface_hub import hf_hub_download

    owner, _, rest = lora.name.partition("/")
    repository, _, file = rest.partition("/")
    if not owner.strip("~.") or not repository or repository.endswith(".safetensors"):
        hint = "name a safetensors file, or OWNER/NAME/FILE on the hub"
        raise ModelError("there is no such file", hint)
    given: Any = {"revision": lora.revision, "local_files_only": local_files_only}
    source = ModelConfig(name=f"{owner}/{repository}", **given)
    with hub.typed_errors(source):
        return Path(hf_hub_download(source.name, file or _DEFAULT_FILE, **given))
