"""Owns getting a model from the hub, and its faults in svdpp's words; shows no token or URL.

What lies in the snapshot is for others to check; knows no torch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from svdpp.config import ModelConfig
from svdpp.errors import ModelError
from svdpp.models.safetensors_header import WEIGHT_STEMS, show
from svdpp.redaction import redact, redact_tokens

#: How to mend a name that means no model.
MODEL_HINT = "--model takes a folder written by save_pretrained, a hub id, or demo"


def download(model: ModelConfig, config_files: Iterable[str], *, weights: bool) -> Path:
    """The hub's snapshot of `model`, complete in the parts that svdpp reads.

    The library's messages stay out of ours: they hold URLs and advice for other programs.

    Args:
        model: a hub id, with the revision and the variant of its weights.
        config_files: what is read besides the weights, as paths in the repository.
        weights: whether they are wanted too.

    Raises:
        ModelError: there is no such model, it may not be downloaded, or the hub is out of reach.
    """
    from huggingface_hub import errors, snapshot_download

    name = show_name(model.name)
    try:
        path = snapshot_download(
            model.name,
            revision=model.revision,
            local_files_only=model.local_files_only,
            allow_patterns=[*config_files, *(_weights(model.variant) if weights else ())],
        )
    except errors.HFValidationError as error:
        raise ModelError(f"{name} is neither a folder nor a valid hub id", MODEL_HINT) from error
    except errors.GatedRepoError as error:
        page = f"https://huggingface.co/{redact_tokens(model.name)}"
        mend = f"accept the licence at {page}, then: hf auth login"
        sentence = f"the hub gives {name} only to those who accepted its licence"
        raise ModelError(sentence, mend) from error
    except errors.RepositoryNotFoundError as error:
        mend = "check the spelling; for a private model: hf auth login"
        sentence = f"there is no folder {name} here and no such model on the hub"
        raise ModelError(sentence, mend) from error
    except errors.RevisionNotFoundError as error:
        mend = "leave --revision out for the newest"
        raise ModelError(f"{name} has no revision {show(model.revision)}", mend) from error
    except errors.LocalEntryNotFoundError as error:
        sentence = (
            f"{name} is not whole on this machine and the hub is out of reach or switched off"
        )
        raise ModelError(sentence, _download_hint(model)) from error
    # HTTPError is the base of the hub's HTTP library; a full disk or a dead wire is an OSError.
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        cause = _cause(error)
        mend = "hf auth login" if cause.endswith(("401", "403")) else _download_hint(model)
        raise ModelError(f"{name} cannot be downloaded ({cause})", mend) from error
    return Path(path)


def commit_of(snapshot: Path) -> str | None:
    """Commit hash of a snapshot: the hub cache names its folder after it; None if it does not."""
    return snapshot.name if re.fullmatch(r"[0-9a-f]{40}", snapshot.name) else None


def show_name(name: str) -> str:
    """A model's name on one short line, without the home or a token that was pasted into it."""
    return show(redact(name))


def _weights(variant: str | None) -> Iterator[str]:
    """Patterns of just the files that are read: a repository may hold every weight three times."""
    tag = f".{variant}" if variant else ""
    for part, stem in WEIGHT_STEMS.items():
        yield from (
            f"{part}/{stem}{tag}.safetensors",
            f"{part}/{stem}{tag}-?????-of-?????.safetensors",
            f"{part}/{stem}.safetensors.index{tag}.json",
        )


def _cause(error: Exception) -> str:
    """What went wrong on the way to the hub, without any URL: it may carry a password."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"the hub answered {status}"
    return getattr(error, "strerror", None) or type(error).__name__


def _download_hint(model: ModelConfig) -> str:
    name = shlex.quote(redact_tokens(model.name))
    return f"hf download {name} where there is a network, or --model demo"
