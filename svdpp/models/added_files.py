"""Files of weights that are added to a checkpoint, found here or on the hub; imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from svdpp.config import AddedFile, ModelConfig
from svdpp.errors import ModelError, RequestError
from svdpp.models.files import display_name, hub_errors, snapshot_commit
from svdpp.models.hashes import file_sha256

_File = TypeVar("_File", bound=AddedFile)
_Content = TypeVar("_Content")


def check_experts(files: Iterable[AddedFile], checkpoint: Any) -> None:
    """Check that each file names an expert if the model has two, and none otherwise.

    Args:
        files: Files as they are asked for.
        checkpoint: Checkpoint of the model, without weights.

    Raises:
        RequestError: The expert of a file is missing or superfluous.
    """
    two_experts = checkpoint.num_experts == 2
    for file in files:
        if two_experts == (file.expert is None):
            experts = "two experts: say which" if two_experts else "one expert: say none"
            hint = "end it with :high or :low" if two_experts else f"leave out :{file.expert}"
            name = display_name(file.name)
            raise RequestError(
                f"{checkpoint.label} has {experts} in `{file.config_field}` {name}", hint
            )


def find_file(
    wanted: _File,
    check: Callable[[Path], _Content],
    *,
    default: str,
    local_files_only: bool,
    is_hashed: bool = True,
) -> tuple[_File, Path, _Content]:
    """Find a file, download it if it is on the hub, and check it.

    Args:
        wanted: File as it is asked for.
        check: Function that checks the file before it is hashed, and returns what it found.
        default: Name of the file in a folder or a repository; empty: it must be named.
        local_files_only: Whether nothing is downloaded.
        is_hashed: Whether the whole file is read for its hash, if that is not known.

    Returns:
        The file as it was asked for, with its absolute path or its commit on the hub, and its hash;
        its path here; and what `check` returned.

    Raises:
        ModelError: There is no such file, its check failed, or its hash is not the one that is
            asked for.
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
            raise ModelError(f"only {wanted.suffix.removeprefix('.')} files are read", "convert it")
        content = check(path)
        if is_hashed:
            sha256 = file_sha256(path)
    except ModelError as error:
        message = f"{label}: {error.message}"
        raise ModelError(message, error.hint, details=error.details) from error
    except OSError as error:
        raise ModelError(f"{label} cannot be read ({error.strerror})") from error
    if wanted.sha256 not in (None, sha256):
        raise ModelError(
            f"the {wanted.noun} {name} has changed since the clip was made",
            "restore it, or make the clip again: svdpp run --overwrite",
        )
    return replace(found, sha256=sha256), path, content


def _download(wanted: AddedFile, default: str, local_files_only: bool) -> Path:
    from huggingface_hub import hf_hub_download

    owner, _, rest = wanted.name.partition("/")
    repository, _, file = rest.partition("/")
    file = file or default
    if not owner.strip("~.") or not repository or not file or repository.endswith(wanted.suffix):
        hint = f"name a {wanted.suffix.removeprefix('.')} file, or OWNER/NAME/FILE on the hub"
        raise ModelError("there is no such file", hint)
    given: Any = {"revision": wanted.revision, "local_files_only": local_files_only}
    source = ModelConfig(name=f"{owner}/{repository}", **given)
    with hub_errors(source):
        return Path(hf_hub_download(source.name, file, **given))
