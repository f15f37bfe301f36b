"""Owns the download of a model from the hub, and its errors; knows no torch.

No message contains a token, or a URL that may contain one. `checkpoint` checks the snapshot.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from svdpp.config import ModelConfig
from svdpp.errors import ModelError
from svdpp.models.safetensors_header import WEIGHT_STEMS, short_repr
from svdpp.redaction import redact, redact_tokens

#: Hint for a name that is not a model.
MODEL_HINT = "--model takes a folder written by save_pretrained, a hub id, or demo"


def download(model: ModelConfig, *, weights: bool) -> Path:
    """Downloads the files that svdpp reads, unless they are cached; returns the snapshot's folder.

    The errors do not quote the library's messages, which contain URLs and advice for other
    programs.

    Args:
        model: a hub id, with the revision and the variant of its weights.
        weights: whether to download the weights too.

    Raises:
        ModelError: there is no such model, the user may not download it, or the hub is
            unreachable.
    """
    from huggingface_hub import errors, snapshot_download

    name = show_name(model.name)
    try:
        path = snapshot_download(
            model.name,
            revision=model.revision,
            local_files_only=model.local_files_only,
            allow_patterns=[
                *_CONFIG_PATTERNS,
                *(_weight_patterns(model.variant) if weights else ()),
            ],
        )
    except errors.HFValidationError as error:
        raise ModelError(f"{name} is neither a folder nor a valid hub id", MODEL_HINT) from error
    except errors.GatedRepoError as error:
        page = f"https://huggingface.co/{redact_tokens(model.name)}"
        hint = f"accept the licence at {page}, then: hf auth login"
        message = f"the hub requires you to accept the licence of {name}"
        raise ModelError(message, hint) from error
    except errors.RepositoryNotFoundError as error:
        hint = "check the spelling; for a private model: hf auth login"
        message = f"{name} is neither a local folder nor a model on the hub"
        raise ModelError(message, hint) from error
    except errors.RevisionNotFoundError as error:
        hint = "omit --revision to use the newest one"
        raise ModelError(f"{name} has no revision {short_repr(model.revision)}", hint) from error
    except errors.LocalEntryNotFoundError as error:
        message = (
            f"{name} is not fully cached here, and the hub is unreachable or offline mode is on"
        )
        raise ModelError(message, _download_hint(model)) from error
    # HTTPError is the base of the hub's HTTP library; a full disk or a network failure is an
    # OSError.
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        cause = _cause(error)
        hint = "hf auth login" if cause.endswith(("401", "403")) else _download_hint(model)
        raise ModelError(f"{name} cannot be downloaded ({cause})", hint) from error
    return Path(path)


def commit_of(snapshot: Path) -> str | None:
    """The commit hash after which the hub cache names a snapshot's folder; None if it does not."""
    return snapshot.name if re.fullmatch(r"[0-9a-f]{40}", snapshot.name) else None


def show_name(name: str) -> str:
    """A model's name for messages: short, on one line, without home folder and tokens."""
    return short_repr(redact(name))


#: Configs of all families, and tokenizers; a few megabytes.
_CONFIG_PATTERNS = (
    "model_index.json",
    *(f"{part}/config.json" for part in WEIGHT_STEMS),
    "scheduler/scheduler_config.json",
    "feature_extractor/preprocessor_config.json",
    "image_processor/preprocessor_config.json",
    "tokenizer/*",
)


def _weight_patterns(variant: str | None) -> Iterator[str]:
    """Patterns of only the files that are read; a repository may have all weights three times."""
    tag = f".{variant}" if variant else ""
    for part, stem in WEIGHT_STEMS.items():
        yield from (
            f"{part}/{stem}{tag}.safetensors",
            f"{part}/{stem}{tag}-?????-of-?????.safetensors",
            f"{part}/{stem}.safetensors.index{tag}.json",
        )


def _cause(error: Exception) -> str:
    """The cause of a failed download, without the URL, which may contain a password."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"the hub answered {status}"
    return getattr(error, "strerror", None) or type(error).__name__


def _download_hint(model: ModelConfig) -> str:
    name = shlex.quote(redact_tokens(model.name))
    return f"run hf download {name} with a network connection, or use --model demo"
