"""The download of a model from the hub, and its errors; knows no torch.

No message contains a token, or a URL that may contain one. `checkpoint` checks the snapshot, and
adds the model's name to the errors.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tqdm
from loguru import logger

from svdpp.config import ModelConfig
from svdpp.errors import ModelError
from svdpp.models.engine.configs import short_repr
from svdpp.models.safetensors_header import weight_files, weight_names
from svdpp.redaction import redact, redact_tokens

#: Hint for a name that is not a model.
MODEL_HINT = "--model takes a folder written by save_pretrained, a hub id, or demo"

#: Configs of all families, and tokenizers; a few megabytes.
_CONFIG_PATTERNS = [
    "model_index.json",
    "*/config.json",
    "*/scheduler_config.json",
    "*/preprocessor_config.json",
    "tokenizer/*",
    "tokenizer_2/*",
    "guider/*",
]


def download(model: ModelConfig, components: Collection[str] = ()) -> Path:
    """Downloads the files that svdpp reads, unless they are cached; returns the snapshot's folder.

    All configs, and the weights of `components`: safetensors of one variant. Each process downloads
    what it needs; the hub's library locks a file that another one downloads.
    """
    from huggingface_hub import constants

    with typed_errors(model):
        folder = _configs(model.name, model.revision, model.local_files_only)
    absent = [part for part in components if not _has_weights(folder, part, model.variant)]
    if absent:
        what, host = show_name(model.name), urlsplit(constants.ENDPOINT).hostname
        # Shown by the command line too, which otherwise shows only the log that a user asks for.
        logger.bind(is_remark=True).info("fetching {} of {} from {}", ", ".join(absent), what, host)
        # The library reads the variable only when it is imported.
        is_quiet = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") == "1"
        bar = _Silent if is_quiet else None
        patterns = [*chain(*(weight_names(part, model.variant) for part in absent))]
        revision = commit_of(folder) or model.revision
        with typed_errors(model, absent):
            _fetch(model.name, revision, model.local_files_only, patterns, bar)
    return folder


@functools.cache
def _configs(name: str, revision: str | None, local_files_only: bool) -> Path:
    """A process keeps to the commit that it finds first, and asks the hub for it only once."""
    return _fetch(name, revision, local_files_only, _CONFIG_PATTERNS, _Silent)


def _fetch(
    name: str, revision: str | None, local_files_only: bool, patterns: list[str], bar: Any
) -> Path:
    from huggingface_hub import snapshot_download

    options: Any = {"revision": revision, "local_files_only": local_files_only}
    return Path(snapshot_download(name, allow_patterns=patterns, tqdm_class=bar, **options))


class _Silent(tqdm.tqdm):  # type: ignore[misc]
    """No progress bar: configs take a moment, and cached ones none."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **{**options, "disable": True})


def _has_weights(folder: Path, component: str, variant: str | None) -> bool:
    with suppress(ModelError):
        return bool(weight_files(folder, component, variant))
    return False


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
        raise ModelError(*_message_and_hint(error, model, components)) from error


def _message_and_hint(
    error: Exception, model: ModelConfig, components: Collection[str]
) -> tuple[str, str]:
    from huggingface_hub import errors

    name = redact_tokens(model.name)
    responses = (getattr(each, "response", None) for each in (error, error.__cause__))
    answer = next((each.status_code for each in responses if each is not None), None)
    match error:
        case errors.GatedRepoError():
            page = f"https://huggingface.co/{name}"
            hint = f"accept the licence at {page}, then: hf auth login"
            return "the hub requires you to accept its licence", hint
        case errors.HFValidationError() | errors.RepositoryNotFoundError():
            hint = f"check the spelling; for a private model: hf auth login; {MODEL_HINT}"
            return "neither a local folder nor a model on the hub", hint
        case errors.LocalEntryNotFoundError() if answer not in (401, 403):
            missing = f" ({', '.join(components)} missing)" if components else ""
            only = "".join(f" --include '{part}/*'" for part in components)
            return (
                f"not fully cached here{missing}, and the hub is unreachable or offline mode is on",
                f"run hf download {shlex.quote(name)}{only} with a network connection, or use "
                "--model demo",
            )
    cause = f"the hub answered {answer}" if answer else type(error).__name__
    cause = getattr(error, "strerror", None) or cause
    return (
        f"cannot be downloaded ({cause})",
        "check --revision, the network and the disk (HF_HOME names another one), and run the "
        "command again: complete files stay in the cache; for a private model: hf auth login",
    )
