"""Search for LoRA and GGUF files, on this machine or on the hub; imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from svdpp.config import AddedFile, ModelConfig
from svdpp.errors import ModelError, RequestError
from svdpp.models.files import display_name
from svdpp.models.hashes import cached_sha256
from svdpp.models.hub import hub_errors, snapshot_commit

_File = TypeVar("_File", bound=AddedFile)
_Content = TypeVar("_Content")


def check_experts(files: Iterable[AddedFile], checkpoint: Any) -> None:
    """Check that LoRA or GGUF files name an expert if and only if the model has two experts.

    The experts are the two denoisers of models such as Wan 2.2 A14B, each for a part of the steps.

    Args:
        files: Requested files.
        checkpoint: Checkpoint of the model, without weights.

    Raises:
        RequestError: The model has two experts, and a file names none. Or the model has one
            denoiser, and a file names an expert.
    """
    two_experts = checkpoint.num_experts == 2
    for file in files:
        if two_experts == (file.expert is None):
            experts = "two experts" if two_experts else "one denoiser"
            problem = "names no expert" if two_experts else "names an expert"
            hint = "end the name with :high or :low" if two_experts else f"leave out :{file.expert}"
            name = display_name(file.name)
            raise RequestError(
                f"{checkpoint.label} has {experts}, but `{file.config_field}` {name} {problem}",
                hint,
            )


def find_file(
    wanted: _File,
    check: Callable[[Path], _Content],
    *,
    default: str,
    local_files_only: bool,
    is_hashed: bool = True,
) -> tuple[_File, Path, _Content]:
    """Find a LoRA or GGUF file, download it if it is on the hub, and check it.

    Args:
        wanted: Requested file.
        check: Function that checks the file, such as `read_gguf_header`. It runs before the hash is
            computed.
        default: File name to use if the user names only a folder or a repository. Empty: the user
            must name the file.
        local_files_only: Whether only files on this machine are used.
        is_hashed: Whether the SHA-256 of the whole file is computed.

    Returns:
        The requested file with its absolute path (or its commit on the hub) and its SHA-256; the
        path on this machine; and the result of `check`.

    Raises:
        ModelError: The file does not exist, `check` failed, or the SHA-256 is not the requested
            one.
    """
    path, name = Path(os.path.expanduser(wanted.name)), display_name(wanted.name)
    label = f"`{wanted.config_field}` {name}"
    sha256 = wanted.sha256
    try:
        if path.exists():
            path = (path / default if path.is_dir() else path).resolve()
            found = replace(wanted, name=str(path))
        else:
            path = _download(wanted, default, local_files_only)
            commits = filter(None, map(snapshot_commit, path.parents))
            found = replace(wanted, revision=next(commits, wanted.revision))
        if path.suffix != wanted.suffix:
            kind = wanted.suffix.removeprefix(".")
            raise ModelError(f"only {kind} files are read", "convert the file")
        content = check(path)
        if is_hashed:
            sha256 = cached_sha256(path)
    except ModelError as error:
        message = f"{label}: {error.message}"
        raise ModelError(message, error.hint, details=error.details) from error
    except OSError as error:
        raise ModelError(f"{label} cannot be read ({error.strerror})") from error
    if wanted.sha256 not in (None, sha256):
        raise ModelError(
            f"the {wanted.noun} {name} has changed since the clip was made",
            "restore the file, or make the clip again: svdpp run --overwrite",
        )
    return replace(found, sha256=sha256), path, content


def _download(wanted: AddedFile, default: str, local_files_only: bool) -> Path:
    from huggingface_hub import hf_hub_download

    owner, _, rest = wanted.name.partition("/")
    repository, _, file = rest.partition("/")
    file = file or default
    if not owner.strip("~.") or not repository or not file or repository.endswith(wanted.suffix):
        hint = f"name a {wanted.suffix.removeprefix('.')} file, or name OWNER/NAME/FILE on the hub"
        raise ModelError("the file does not exist", hint)
    given: Any = {"revision": wanted.revision, "local_files_only": local_files_only}
    source = ModelConfig(name=f"{owner}/{repository}", **given)
    with hub_errors(source):
        return Path(hf_hub_download(source.name, file, **given))
