"""The download of a model from the hub, and its errors; knows no torch.

No message contains a token, or a URL that may contain one. `checkpoint` checks the snapshot.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import shlex
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tqdm
from loguru import logger

from svdpp.config import ModelConfig
from svdpp.errors import ModelError
from svdpp.models.engine.configs import short_repr
from svdpp.models.safetensors_header import choose_weight_files, names_in
from svdpp.redaction import redact, redact_tokens

#: Hint for a name that is not a model.
MODEL_HINT = "--model takes a folder written by save_pretrained, a hub id, or demo"

#: Configs of all families, and tokenizers; a few megabytes.
_CONFIG_PATTERNS = (
    "model_index.json",
    "*/config.json",
    "*/scheduler_config.json",
    "*/preprocessor_config.json",
    "tokenizer/*",
    "tokenizer_2/*",
    "guider/*",
)
_FULL_DISK_HINT = "free some space, or name a folder on another disk with HF_HOME"
# The snapshots that this process has found, by cache, name and revision.
_snapshots: dict[tuple[str, str, str | None], Path] = {}


def download(model: ModelConfig, components: Collection[str] = ()) -> Path:
    """Downloads the files that svdpp reads, unless they are cached; returns the snapshot's folder.

    All configs, and the weights of `components`: safetensors of one variant, in one form. Each
    process downloads what it needs; the hub's library locks a file that another one downloads. A
    process keeps to the commit that it finds first, and asks the hub for it only once.
    """
    from huggingface_hub import constants

    folder = _snapshots.get((constants.HF_HUB_CACHE, model.name, model.revision))
    if folder is None or not folder.is_dir():
        with typed_errors(model):
            folder = _snapshot(model, model.revision, _CONFIG_PATTERNS, shows=False)
        for revision in (model.revision, commit_of(folder) or model.revision):
            _snapshots[constants.HF_HUB_CACHE, model.name, revision] = folder
    absent = [part for part in components if not _has_weights(folder, part, model.variant)]
    if absent:
        _download_weights(model, folder, absent)
    return folder


def _download_weights(model: ModelConfig, folder: Path, components: Collection[str]) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.hf_api import RepoFile

    if model.local_files_only or HF_HUB_OFFLINE:
        raise _not_cached(model, components)
    pinned = commit_of(folder) or model.revision
    with typed_errors(model, components):
        tree = HfApi().list_repo_tree(model.name, revision=pinned, recursive=True)
        sizes = {each.path: each.size for each in tree if isinstance(each, RepoFile)}
    files: list[str] = []
    for part in components:
        try:
            files += choose_weight_files(sizes, part, model.variant)
        except ModelError as error:
            message = f"model {show_name(model.name)}: {error.message}"
            raise ModelError(message, error.hint) from error
    missing = {name: sizes[name] for name in files if not (folder / name).exists()}
    if not missing:  # `checkpoint` says what is wrong with a file in the cache
        return
    _announce(model, components, missing)
    # The library reads the variable only when it is imported.
    shows = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") != "1"
    with typed_errors(model, components):
        _snapshot(model, pinned, map(glob.escape, missing), shows=shows)


def _snapshot(model: ModelConfig, revision: str | None, patterns: Any, *, shows: bool) -> Path:
    """The folder of a snapshot with these files; `shows` a progress bar."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model.name,
            revision=revision,
            local_files_only=model.local_files_only,
            allow_patterns=list(patterns),
            tqdm_class=None if shows else _Silent,
        )
    )


class _Silent(tqdm.tqdm):  # type: ignore[misc]
    """No progress bar: configs take a moment, and cached ones none."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **{**options, "disable": True})


def _has_weights(folder: Path, component: str, variant: str | None) -> bool:
    with suppress(ModelError):
        return bool(choose_weight_files(names_in(folder, component), component, variant))
    return False


def _announce(model: ModelConfig, components: Collection[str], sizes: Mapping[str, int]) -> None:
    """Says what a download takes, and from where; refuses one that does not fit on the disk."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).absolute()
    free = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free
    needed = sum(sizes.values())
    where = f"{_size(free)} are free in {redact(str(cache))!r}"
    what = f"{_size(needed)} of {show_name(model.name)} ({', '.join(components)})"
    if needed > free:
        raise ModelError(f"{what} are to be downloaded, and only {where}", _FULL_DISK_HINT)
    host = urlsplit(constants.ENDPOINT).hostname
    # Shown by the command line too, which otherwise shows only the log that a user asks for.
    logger.bind(is_remark=True).info("downloading {} from {}; {}", what, host, where)


def commit_of(snapshot: Path) -> str | None:
    """The commit hash after which the hub cache names a snapshot's folder; None if it does not."""
    return snapshot.name if re.fullmatch(r"[0-9a-f]{40}", snapshot.name) else None


def show_name(name: str) -> str:
    """A model's name for messages: short, on one line, without home folder and tokens."""
    return short_repr(redact(name))


@contextmanager
def typed_errors(model: ModelConfig, components: Collection[str] = ()) -> Iterator[None]:
    """Converts the errors of the hub's library to ModelError.

    The messages do not quote the library's, which contain URLs and advice for other programs.
    """
    from huggingface_hub import errors

    try:
        yield
    # HTTPError is the base of the hub's HTTP library; a full disk or a network failure is an
    # OSError; the hub's other transfer library, hf_xet, raises RuntimeError.
    except (
        errors.HFValidationError,
        errors.HTTPError,  # type: ignore[attr-defined]
        OSError,
        RuntimeError,
    ) as error:
        raise _typed(error, model, components) from error


def _typed(error: Exception, model: ModelConfig, components: Collection[str]) -> ModelError:
    from huggingface_hub import errors

    name, text, hint = show_name(model.name), "", ""
    match error:
        case errors.HFValidationError():
            text, hint = "is neither a folder nor a valid hub id", MODEL_HINT
        case errors.GatedRepoError():
            page = f"https://huggingface.co/{redact_tokens(model.name)}"
            hint = f"accept the licence at {page}, then: hf auth login"
            return ModelError(f"the hub requires you to accept the licence of {name}", hint)
        case errors.RepositoryNotFoundError():
            text = "is neither a local folder nor a model on the hub"
            hint = "check the spelling; for a private model: hf auth login"
        case errors.RemoteEntryNotFoundError():
            text = "on the hub has no such file"
        case errors.RevisionNotFoundError():
            text = f"has no revision {short_repr(model.revision)}"
            hint = "omit --revision to use the newest one"
        case errors.LocalEntryNotFoundError() if _status(error.__cause__) not in _FORBIDDEN:
            return _not_cached(model, components)
        case errors.LocalEntryNotFoundError():
            return _not_downloaded(name, error.__cause__)
        case _:
            return _not_downloaded(name, error)
    return ModelError(f"{name} {text}", hint)


def _not_downloaded(name: str, error: BaseException | None) -> ModelError:
    """The error for a failed download, without the URL, which may contain a password."""
    hint = "run the command again: complete files stay in the cache"
    status = _status(error)
    if getattr(error, "errno", None) == errno.ENOSPC:
        hint = _FULL_DISK_HINT
    elif status in _FORBIDDEN:
        hint = "hf auth login"
    cause = getattr(error, "strerror", None) or type(error).__name__
    answer = cause if status is None else f"the hub answered {status}"
    return ModelError(f"{name} cannot be downloaded ({answer})", hint)


def _not_cached(model: ModelConfig, components: Collection[str]) -> ModelError:
    """The error for files that are not in the cache, where they cannot be downloaded."""
    missing = f" ({', '.join(components)} missing)" if components else ""
    only = "".join(f" --include '{part}/*'" for part in components)
    name = shlex.quote(redact_tokens(model.name))
    return ModelError(
        f"{show_name(model.name)} is not fully cached here{missing}, and the hub is unreachable or "
        "offline mode is on",
        f"run hf download {name}{only} with a network connection, or use --model demo",
    )


def _status(error: BaseException | None) -> int | None:
    """The status of the hub's answer, if `error` is about one."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


_FORBIDDEN = (401, 403)
