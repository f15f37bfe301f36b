"""Downloads from the Hugging Face hub; imports no torch.

Errors of `huggingface_hub` become a `ModelError`. Its message contains no access tokens, and no
URLs, because a URL may contain a token.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tqdm

from svdpp.config import ModelConfig
from svdpp.errors import ModelError, redact_tokens
from svdpp.models.files import (
    MODEL_HINT,
    ComponentFolder,
    weight_files,
    weight_names,
    weights_pattern,
)

#: Patterns of all files of a model except weights, for all families. These files have a few
#: megabytes in all.
_CONFIG_PATTERNS = (
    *("model_index.json", "modular_model_index.json", "*/config.json", "*/scheduler_config.json"),
    *("*/preprocessor_config.json", "tokenizer/*", "tokenizer_2/*", "text_tokenizer/*"),
    *("guider/*", "guider_2/*"),
)
# Patterns of files without weights, in the folder of any component.
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
# Patterns of pickles and programs, which can run code. A tokenizer's folder may contain some, and
# `_CONFIG_PATTERNS` includes all files of that folder.
_NEVER_DOWNLOADED = ("*.py", "*.bin", "*.ckpt", "*.pt", "*.pth", "*.pkl", "*.pickle")


def download_configs(model: ModelConfig) -> Path:
    """Download a hub model's configs, unless the cache has them.

    Args:
        model: Hub model, with revision.

    Returns:
        Folder of the model's snapshot in the hub's cache.

    Raises:
        ModelError: The hub cannot be reached or denies access, or the disk is full.
    """
    with hub_errors(model):
        return fetch_snapshot(
            model.name, model.revision, model.local_files_only, _CONFIG_PATTERNS, _Silent
        )


def download_component_configs(model: ModelConfig, subfolders: Collection[str]) -> Path:
    """Download the configs and other small files of components, unless the cache has them.

    Args:
        model: Repository of the components, with revision.
        subfolders: Folders of the components; "" is the root of the repository.

    Returns:
        Folder of the repository's snapshot in the hub's cache.

    Raises:
        ModelError: The hub cannot be reached or denies access, or the disk is full.
    """
    folders = [f"{subfolder}/" if subfolder else "" for subfolder in sorted(subfolders)]
    patterns = tuple(f"{folder}{pattern}" for folder in folders for pattern in _SMALL_FILES)
    with hub_errors(model, patterns=_SMALL_FILES):
        return fetch_snapshot(model.name, model.revision, model.local_files_only, patterns, _Silent)


def download_weights(model: ModelConfig, components: Iterable[ComponentFolder]) -> None:
    """Download the weights of components of one repository, unless the cache has them.

    Args:
        model: Repository of the components, with revision and the requested variant.
        components: Components whose weights are downloaded.

    Raises:
        ModelError: The hub cannot be reached or denies access, or the disk is full.
    """
    components = list(components)
    # The first pass downloads the files of the requested variant. The second pass (None) downloads
    # the plain files of components that lack the variant.
    for variant in dict.fromkeys((model.variant, None)):
        absent = [each for each in components if not _has_weights(each, model.variant)]
        if not absent:
            return
        patterns: list[str] = []
        for component in absent:
            wanted = component.variant if model.variant is None else variant
            names = weight_names(component.part, wanted)
            every = (names.single, *names.shards, *names.indices)
            patterns += map(component.path_in_root, every)
        with hub_errors(
            model,
            missing=[each.part for each in absent],
            patterns=[weights_pattern(each) for each in absent],
        ):
            fetch_snapshot(
                model.name, model.revision, model.local_files_only, tuple(patterns), None
            )


# The result is cached, so that a process uses the same commit throughout, even if the repository on
# the hub changes meanwhile.
@functools.cache
def fetch_snapshot(
    name: str, revision: str | None, local_files_only: bool, patterns: tuple[str, ...], bar: Any
) -> Path:
    """Download files of a repository to the hub's cache, and return the folder of the snapshot.

    Args:
        name: Hub id of the repository.
        revision: Branch, tag or commit; None: the main branch.
        local_files_only: Whether only files in the cache are used, and nothing is downloaded.
        patterns: Patterns of the paths of the files.
        bar: Class of the progress bar; None: the bar of `huggingface_hub`.
    """
    from huggingface_hub import snapshot_download

    options: Any = {"revision": revision, "local_files_only": local_files_only}
    wanted: Any = {"allow_patterns": [*patterns], "ignore_patterns": [*_NEVER_DOWNLOADED]}
    return Path(snapshot_download(name, tqdm_class=bar, **wanted, **options))


class _Silent(tqdm.tqdm):  # type: ignore[misc]
    """Progress bar that prints nothing, for configs, whose download takes only a moment."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **{**options, "disable": True})


def _has_weights(component: ComponentFolder, variant: str | None) -> bool:
    with suppress(ModelError):
        return bool(weight_files(component, variant))
    return False


def snapshot_commit(snapshot: Path) -> str | None:
    """Return the commit hash of a snapshot folder in the hub's cache; None for other folders."""
    return snapshot.name if re.fullmatch(r"[0-9a-f]{40}", snapshot.name) else None


@contextmanager
def hub_errors(
    model: ModelConfig,
    *,
    missing: Collection[str] = (),
    patterns: Collection[str] = _CONFIG_PATTERNS,
) -> Iterator[None]:
    """Turn errors of `huggingface_hub` in the `with` block into a `ModelError`.

    The new message does not quote that of `huggingface_hub`, which contains URLs and advice for
    other programs.

    Args:
        model: Model that the block downloads.
        missing: Names of the components whose weights the block downloads, for the message.
        patterns: Patterns of the files that the block downloads. The hint is an `hf download`
            command for these files only, because a whole model can have 126 GB.

    Raises:
        ModelError: A download failed.
    """
    from huggingface_hub import errors

    try:
        yield
    # HTTPError is the base class of errors in HTTP requests. A full disk or a network failure is an
    # OSError. The package hf_xet, which transfers large files, raises RuntimeError.
    except (
        errors.HFValidationError,
        errors.HTTPError,  # type: ignore[attr-defined]
        OSError,
        RuntimeError,
    ) as error:
        status = _status_of(error)
        message, hint = _message_and_hint(error, status, model, missing, patterns)
        raise ModelError(
            message, hint, details={} if status is None else {"status": status}
        ) from error


def _status_of(error: Exception) -> int | None:
    """Return the HTTP status in an error of the hub; None if the hub did not respond."""
    responses = (getattr(each, "response", None) for each in (error, error.__cause__))
    return next((each.status_code for each in responses if each is not None), None)


def _message_and_hint(
    error: Exception,
    status: int | None,
    model: ModelConfig,
    missing: Collection[str],
    patterns: Collection[str],
) -> tuple[str, str]:
    from huggingface_hub import errors

    name = redact_tokens(model.name)
    match error:
        case errors.GatedRepoError():
            page = f"https://huggingface.co/{name}"
            hint = f"accept the licence at {page}, then run: hf auth login"
            return "the hub requires you to accept its licence", hint
        case errors.HFValidationError() | errors.RepositoryNotFoundError():
            hint = f"check the spelling; for a private model, run hf auth login; {MODEL_HINT}"
            return "neither a local folder nor a model on the hub", hint
        case errors.LocalEntryNotFoundError() if status not in (401, 403):
            named = f" ({', '.join(missing)} missing)" if missing else ""
            only = "".join(f" --include '{each}'" for each in patterns)
            return (
                f"not fully cached here{named}, and the hub is unreachable or offline mode is on",
                f"run hf download {shlex.quote(name)}{only} with a network connection, or use "
                "`model` demo",
            )
    cause = f"the hub answered {status}" if status else type(error).__name__
    cause = getattr(error, "strerror", None) or cause
    return (
        f"cannot be downloaded ({cause})",
        "check the network and the disk (HF_HOME sets the cache folder), and run the command "
        "again: complete files stay in the cache; check `revision`; for a private model, run hf "
        "auth login",
    )
