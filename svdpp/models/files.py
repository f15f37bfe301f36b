"""Files of a model: downloads, configs and headers of weight files; imports no torch.

All files are untrusted. Errors of the libraries become a `ModelError` without access tokens, and
without URLs, which may contain tokens. `models.checkpoint` adds the model's name.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import re
import reprlib
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import tqdm
from safetensors import SafetensorError, safe_open

from svdpp.config import ModelConfig
from svdpp.errors import (
    ModelError,
    first_line,
    is_out_of_memory,
    redact,
    redact_tokens,
)

#: Hint of errors about a complete checkpoint that svdpp cannot run.
UNSUPPORTED_HINT = "use another checkpoint: svdpp models lists the families that svdpp runs"
#: Hint of errors about a name that is neither a folder nor a model on the hub.
MODEL_HINT = "`model` takes a folder written by save_pretrained, a hub id, demo or demo-text"

#: Patterns of the files without weights (a few megabytes), for models of all families.
_CONFIG_PATTERNS = (
    *("model_index.json", "modular_model_index.json", "*/config.json", "*/scheduler_config.json"),
    *("*/preprocessor_config.json", "tokenizer/*", "tokenizer_2/*", "text_tokenizer/*", "guider/*"),
)
# Patterns of pickles and programs, which a tokenizer's folder may contain.
_NEVER_DOWNLOADED = ("*.py", "*.bin", "*.ckpt", "*.pt", "*.pth", "*.pkl", "*.pickle")

_MAX_CONFIG_BYTES = 16 * 2**20
# Number of bytes of each tensor that a fingerprint covers. A few suffice, because training changes
# every number.
_SAMPLED_BYTES = 64
_WEIGHTS_HINT = (
    "`variant` fp16 reads files with .fp16 in the name; pickles (.bin) can run code and are not "
    "read: convert them with save_pretrained(..., safe_serialization=True)"
)

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100
_REPR.maxlevel = 2


def short_repr(value: object) -> str:
    """Return the repr of an untrusted value on one line, shortened to about 100 characters."""
    return _REPR.repr(value)


def display_name(name: str) -> str:
    """Return a model's name for messages: short, on one line, without home folder or tokens."""
    return short_repr(redact(name))


@contextmanager
def library_errors(component: str, checkpoint: Any = None) -> Iterator[None]:
    """Turn errors of diffusers and transformers in the `with` block into a `ModelError`.

    Args:
        component: Name of the component that the block loads, for the message.
        checkpoint: Checkpoint whose name the message begins with; None: the message has no name.

    Raises:
        ModelError: The block raised an exception. Out-of-memory errors pass unchanged.
    """
    label = f"{checkpoint.label}: " if checkpoint else ""
    try:
        yield
    except ModelError as error:
        message = label + error.message
        raise ModelError(message, error.hint, details=error.details) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise
        problem = first_line(error)
        if isinstance(error, KeyError):
            problem = f"there is no {problem}"
        raise ModelError(
            f"{label}{component} cannot be loaded: {problem}",
            details={"component": component, "problem": problem},
        ) from error


# --- configs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JsonFile:
    """JSON object that was read from a file of a checkpoint."""

    label: str
    """Path of the file relative to the checkpoint's folder, for messages."""
    values: Mapping[str, Any]

    def error(
        self, message: str, hint: str = "", *, details: Mapping[str, Any] | None = None
    ) -> ModelError:
        """Return a `ModelError` whose message and details name the file.

        Args:
            message: Message without the name of the file.
            hint: Fix for the user. "": the hint is to download the checkpoint again.
            details: Further details by name; None: none.
        """
        return ModelError(
            f"{self.label}: {message}", hint, details={"file": self.label, **(details or {})}
        )

    def positive_int(self, key: str, largest: int) -> int:
        """Return the integer at `key`.

        Raises:
            ModelError: The value is not an integer from 1 to `largest`.
        """
        value = self.values.get(key)
        if type(value) is not int or not 1 <= value <= largest:
            raise self.error(
                f"{key} is {short_repr(value)}, not an integer from 1 to {largest}",
                details={"key": key, "value": short_repr(value), "lowest": 1, "highest": largest},
            )
        return value

    def require(self, key: str, expected: object, reason: str) -> None:
        """Check that the value at `key` is `expected`.

        Args:
            key: Key of the object.
            expected: The only value that svdpp supports.
            reason: Reason why other values are not supported, as the last clause of the message.

        Raises:
            ModelError: The value is not `expected`.
        """
        if (value := self.values.get(key)) != expected:
            raise self.error(
                f"{key} is {short_repr(value)} but must be {expected}, {reason}",
                UNSUPPORTED_HINT,
                details={"key": key, "value": short_repr(value), "expected": expected},
            )

    def refuse(self, key: str, reason: str) -> None:
        """Check that the value at `key`, or each element of a list, is false or missing.

        Args:
            key: Key of the object.
            reason: Effect of the key, as a clause such as "draws noise".

        Raises:
            ModelError: The value, or an element of it, is neither false nor missing.
        """
        value = self.values.get(key)
        if any(value) if isinstance(value, list) else value:
            raise self.error(
                f"the key {key} is not supported: it {reason}",
                UNSUPPORTED_HINT,
                details={"key": key},
            )


def read_json(folder: Path, name: str) -> JsonFile:
    """Read a JSON object of at most 16 MiB from a file of a checkpoint.

    Args:
        folder: Folder of the checkpoint.
        name: Path of the file relative to `folder`.

    Raises:
        ModelError: The file is missing, is not a regular file, cannot be read, or does not contain
            a JSON object.
    """
    if not (folder / name).is_file():  # a pipe counts as missing: reading it would never end
        raise ModelError(f"{name} is missing", details={"file": name})
    try:
        with (folder / name).open("rb") as file:
            values = json.loads(file.read(_MAX_CONFIG_BYTES))
    except OSError as error:
        raise ModelError(f"{name} cannot be read ({error.strerror})") from error
    # A file that is too long is read only in part, so its JSON is not valid either.
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name} does not hold valid JSON", details={"file": name}) from error
    if not isinstance(values, dict):
        raise ModelError(f"{name} does not hold a JSON object", details={"file": name})
    return JsonFile(name, values)


# --- hub ------------------------------------------------------------------------------------------


def download(model: ModelConfig, components: Collection[str] = ()) -> Path:
    """Download a hub model's configs and the weights of components, unless the cache has them.

    Args:
        model: Hub model, with revision and variant.
        components: Names of the components whose weights are downloaded.

    Returns:
        Folder of the model's snapshot in the hub's cache.

    Raises:
        ModelError: The hub cannot be reached or denies access, or the disk is full.
    """
    with hub_errors(model):
        given = model.local_files_only, _CONFIG_PATTERNS, _Silent
        folder = _fetch(model.name, model.revision, *given)
    # The second pass, with the variant None, downloads plain files for components that lack the
    # variant.
    for variant in dict.fromkeys((model.variant, None)):
        absent = [part for part in components if not _has_weights(folder, part, model.variant)]
        if absent:
            named = [_weight_names(part, variant) for part in absent]
            patterns = tuple(chain(*((each.single, *each.shards, *each.indices) for each in named)))
            revision = snapshot_commit(folder) or model.revision
            with hub_errors(model, absent):
                _fetch(model.name, revision, model.local_files_only, patterns, None)
    return folder


@functools.cache  # cached, so that a process uses one commit even if the hub's model changes
def _fetch(
    name: str, revision: str | None, local_files_only: bool, patterns: tuple[str, ...], bar: Any
) -> Path:
    from huggingface_hub import snapshot_download

    options: Any = {"revision": revision, "local_files_only": local_files_only}
    wanted: Any = {"allow_patterns": [*patterns], "ignore_patterns": [*_NEVER_DOWNLOADED]}
    return Path(snapshot_download(name, tqdm_class=bar, **wanted, **options))


class _Silent(tqdm.tqdm):  # type: ignore[misc]
    """Progress bar that prints nothing, because configs are small and downloaded in a moment."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **{**options, "disable": True})


def _has_weights(folder: Path, component: str, variant: str | None) -> bool:
    with suppress(ModelError):
        return bool(weight_files(folder, component, variant))
    return False


def snapshot_commit(snapshot: Path) -> str | None:
    """Return the commit hash of a snapshot folder in the hub's cache; None for other folders."""
    return snapshot.name if re.fullmatch(r"[0-9a-f]{40}", snapshot.name) else None


@contextmanager
def hub_errors(model: ModelConfig, components: Collection[str] = ()) -> Iterator[None]:
    """Turn errors of `huggingface_hub` in the `with` block into a `ModelError`.

    The messages of `huggingface_hub` are left out, because they contain URLs and advice for other
    programs.

    Args:
        model: Model that the block downloads.
        components: Names of the components whose weights the block downloads, for the message.

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
        message, hint = _message_and_hint(error, status, model, components)
        raise ModelError(
            message, hint, details={} if status is None else {"status": status}
        ) from error


def _status_of(error: Exception) -> int | None:
    """Return the HTTP status in an error of the hub; None if the hub did not respond."""
    responses = (getattr(each, "response", None) for each in (error, error.__cause__))
    return next((each.status_code for each in responses if each is not None), None)


def _message_and_hint(
    error: Exception, status: int | None, model: ModelConfig, components: Collection[str]
) -> tuple[str, str]:
    from huggingface_hub import errors

    name = redact_tokens(model.name)
    match error:
        case errors.GatedRepoError():
            page = f"https://huggingface.co/{name}"
            hint = f"accept the licence at {page}, then: hf auth login"
            return "the hub requires you to accept its licence", hint
        case errors.HFValidationError() | errors.RepositoryNotFoundError():
            hint = f"check the spelling; for a private model: hf auth login; {MODEL_HINT}"
            return "neither a local folder nor a model on the hub", hint
        case errors.LocalEntryNotFoundError() if status not in (401, 403):
            missing = f" ({', '.join(components)} missing)" if components else ""
            # Without `components`, the hint downloads only configs: a few megabytes instead of up
            # to 126 GB.
            needed = [f"{part}/*" for part in components] or _CONFIG_PATTERNS
            only = "".join(f" --include '{each}'" for each in needed)
            return (
                f"not fully cached here{missing}, and the hub is unreachable or offline mode is on",
                f"run hf download {shlex.quote(name)}{only} with a network connection, or use "
                "`model` demo",
            )
    cause = f"the hub answered {status}" if status else type(error).__name__
    cause = getattr(error, "strerror", None) or cause
    return (
        f"cannot be downloaded ({cause})",
        "check `revision`, the network and the disk (HF_HOME sets the cache folder), and run the "
        "command again: complete files stay in the cache; for a private model: hf auth login",
    )


# --- weights --------------------------------------------------------------------------------------


class _Names(NamedTuple):
    """File names of a component's weights in one variant."""

    single: str
    """Name of the file if one file contains all weights."""
    shards: tuple[str, str]
    """Patterns of the names of shards: as diffusers names them today, and as until 2024."""
    indices: tuple[str, str]
    """Names of the index file that lists the shards: as diffusers names it today, and as until
    2024."""


def _weight_names(component: str, variant: str | None) -> _Names:
    # Weight files of text and image encoders are named by transformers, all others by diffusers.
    stem = "model" if "_encoder" in component else "diffusion_pytorch_model"
    start, tag = f"{component}/{stem}", f".{variant}" if variant else ""
    return _Names(
        f"{start}{tag}.safetensors",
        (
            f"{start}{tag}-?????-of-?????.safetensors",
            f"{start}-?????-of-?????{tag}.safetensors",
        ),
        (f"{start}.safetensors.index{tag}.json", f"{start}.safetensors{tag}.index.json"),
    )


def _file_names(folder: Path, component: str) -> list[str]:
    # Only regular files are listed, because reading a pipe would never end.
    paths = filter(Path.is_file, (folder / component).glob("*"))
    return sorted(f"{component}/{path.name}" for path in paths)


def _has_names(folder: Path, component: str, variant: str | None) -> bool:
    known = _weight_names(component, variant)
    names = _file_names(folder, component)
    return any(name == known.single or name in known.indices for name in names)


def variant_of(folder: Path, component: str, variant: str | None) -> str | None:
    """Return the variant in which a component's weights are read; None: the plain files.

    As in diffusers, a component that lacks the variant is read from its plain files if another
    component has the variant.

    Args:
        folder: Folder of the checkpoint.
        component: Name of the component.
        variant: Requested variant, such as fp16; None: the plain files.
    """
    if variant is None or _has_names(folder, component, variant):
        return variant
    others = {path.parent.name for path in folder.glob("*/*.safetensors*")} - {component}
    is_mixed = any(_has_names(folder, other, variant) for other in others)
    return None if is_mixed and _has_names(folder, component, None) else variant


def weight_files(folder: Path, component: str, variant: str | None) -> list[str]:
    """Return the weight files of a component that diffusers and transformers read.

    The result is a single file, or the shards that an index lists. If both exist, diffusers reads
    the shards and transformers reads the single file.

    Args:
        folder: Folder of the checkpoint.
        component: Name of the component.
        variant: Requested variant; see `variant_of`.

    Raises:
        ModelError: The component has no weight files, or the index is damaged.
    """
    variant = variant_of(folder, component, variant)
    names, known = _file_names(folder, component), _weight_names(component, variant)
    index = next((each for each in known.indices if each in names), None)
    if index is not None and not ("_encoder" in component and known.single in names):
        return _shards(read_json(folder, index), component, known.shards, names)
    if known.single in names:
        return [known.single]
    details = {"component": component, "variant": variant}
    missing = f"{known.single} is missing"
    if others := [name for name in names if not name.endswith(".json")]:
        there = f"{missing}; there are {short_repr(', '.join(others))}"
        raise ModelError(there, _WEIGHTS_HINT, details=details)
    raise ModelError(missing, details=details)


def _shards(
    index: JsonFile, component: str, patterns: tuple[str, ...], names: list[str]
) -> list[str]:
    listed = index.values.get("weight_map")
    files = listed.values() if isinstance(listed, dict) else [listed]
    for name in files:  # an untrusted index could name a pickle, or a file outside the folder
        path = f"{component}/{name}"
        if not any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns):
            raise index.error(
                f"the index lists {short_repr(name)}, which is not the name of a shard"
            )
    shards = sorted({f"{component}/{name}" for name in files})
    # Shards are missing after an interrupted download, for example.
    if missing := {*shards} - {*names}:
        raise index.error(
            f"{len(missing)} of {len(shards)} shards are missing",
            details={
                "missing": sorted(missing),
                "missing_shards": len(missing),
                "shards": len(shards),
            },
        )
    return shards


def read_dtypes(path: Path) -> list[str]:
    """Return the dtype of each tensor in a safetensors file, in the format's names such as BF16.

    Raises:
        ModelError: The file cannot be read, or is damaged.
    """
    return [entry["dtype"] for entry in read_safetensors_header(path)[1].values()]


def fingerprint(folder: Path, files: Iterable[Path]) -> str:
    """Return the SHA-256 of the headers of weight files and of 64 bytes of each tensor, in hex.

    This reads a few hundred KB instead of several GB. The result differs for models that were
    trained differently, because training changes every number. Only `Checkpoint.file_hashes`
    detects any change.

    Raises:
        ModelError: A file cannot be read, or is damaged.
    """
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        header, entries = read_safetensors_header(path)
        digest.update(header)
        with path.open("rb") as file:
            for begin, end in sorted(each["data_offsets"] for each in entries.values()):
                size = min(_SAMPLED_BYTES, end - begin)
                file.seek(8 + len(header) + (begin + end - size) // 2)
                digest.update(file.read(size))
    return digest.hexdigest()


def read_safetensors_header(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Read the header of a safetensors file.

    Returns:
        Bytes of the header; and a dict with `dtype`, `shape` and `data_offsets` of each tensor, by
        the tensor's name.

    Raises:
        ModelError: The file cannot be read, or is damaged.
    """
    label = f"{path.parent.name}/{path.name}"
    try:
        # The library checks that the tensors fill the file without gaps.
        with path.open("rb") as file, safe_open(path, framework="np"):
            header = file.read(int.from_bytes(file.read(8), "little"))
    except OSError as error:
        problem = error.strerror or str(error)
        raise ModelError(
            f"{label} cannot be read ({problem})", details={"file": label, "problem": problem}
        ) from error
    except SafetensorError as error:
        reason = short_repr(str(error)).strip("'\"")
        raise ModelError(
            f"{label} is damaged or truncated: {reason}",
            details={"file": label, "problem": str(error)},
        ) from error
    entries: dict[str, Any] = json.loads(header)
    entries.pop("__metadata__", None)
    return header, entries
