"""Files of a model: JSON configs, names and headers of weight files; imports no torch.

All files are untrusted. Errors of diffusers, transformers and safetensors become a `ModelError`.
Its message contains no access tokens, and no URLs, because a URL may contain a token.
`models.checkpoint` adds the model's name to the message.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import reprlib
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from svdpp.errors import ModelError, first_line, is_out_of_memory, redact

#: Hint of errors about a checkpoint that is complete, but that svdpp cannot run.
UNSUPPORTED_HINT = "use another checkpoint: svdpp models lists the families that svdpp runs"
#: Hint of errors about quantised weights.
QUANTISED_HINT = (
    "use the original checkpoint, which is not quantised; many families also take a quantised "
    "denoiser from a GGUF file: `denoisers` FILE.gguf"
)
#: Hint of errors about a name that is neither a folder nor a model on the hub.
MODEL_HINT = "`model` takes a folder written by save_pretrained, a hub id, demo or demo-text"

_MAX_CONFIG_BYTES = 16 * 2**20
# Number of bytes of each tensor that `fingerprint` hashes. A few bytes are enough to tell models
# apart, because training changes every weight.
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
    """Return a model's or file's name for messages: short, one line, no home folder or tokens."""
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


# --- config files ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class JsonFile:
    """JSON object that was read from a file of a checkpoint."""

    label: str
    """Path of the file relative to the checkpoint's folder, for messages. For a file of another
    repository, the repository's name follows."""
    values: Mapping[str, Any]
    hint: str = ""
    """Hint of errors about the file, if the error has no other hint. "": the hint is to download
    the checkpoint again."""

    def error(
        self, message: str, hint: str = "", *, details: Mapping[str, Any] | None = None
    ) -> ModelError:
        """Return a `ModelError` whose message and details name this JSON file of a checkpoint.

        Args:
            message: Message without the name of the file.
            hint: What the user can do. "": the hint of this file.
            details: Further details by name; None: no further details.
        """
        return ModelError(
            f"{self.label}: {message}",
            hint or self.hint,
            details={"file": self.label, **(details or {})},
        )

    def positive_int(self, key: str, largest: int) -> int:
        """Return the integer at a key of a checkpoint's JSON file, which must be 1 to `largest`.

        Args:
            key: Key of the object.
            largest: Largest value that is allowed.

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
        """Raise a `ModelError` unless a key of a checkpoint's JSON file has the expected value.

        Args:
            key: Key of the object.
            expected: The only value that svdpp supports.
            reason: Reason why svdpp supports no other value. It is the end of the message.

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
        """Raise a `ModelError` if a key of a checkpoint's JSON file has a truthy value.

        A list is truthy if any of its elements is truthy.

        Args:
            key: Key of the object.
            reason: Effect of the key, which follows "it" in the message, such as "draws noise".

        Raises:
            ModelError: The value, or an element of the list, is truthy, such as `true` or 1.
        """
        value = self.values.get(key)
        if any(value) if isinstance(value, list) else value:
            raise self.error(
                f"the key {key} is not supported: it {reason}",
                UNSUPPORTED_HINT,
                details={"key": key},
            )


def read_json(folder: Path, name: str, *, label: str = "", hint: str = "") -> JsonFile:
    """Read a JSON object of at most 16 MiB from a file of a checkpoint.

    Args:
        folder: Folder of the checkpoint.
        name: Path of the file relative to `folder`.
        label: Name of the file in messages; "": `name`.
        hint: Hint of errors about the file. "": the hint is to download the checkpoint again.

    Raises:
        ModelError: The file is missing, is not a regular file, cannot be read, or does not contain
            a JSON object.
    """
    label = label or name
    details = {"file": label}
    if not (folder / name).is_file():  # a pipe counts as missing: reading it would never end
        raise ModelError(f"{label} is missing", hint, details=details)
    try:
        with (folder / name).open("rb") as file:
            values = json.loads(file.read(_MAX_CONFIG_BYTES))
    except OSError as error:
        raise ModelError(f"{label} cannot be read ({error.strerror})", hint) from error
    # A file above the size limit is cut off when it is read, so its JSON is invalid, too.
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{label} does not hold valid JSON", hint, details=details) from error
    if not isinstance(values, dict):
        raise ModelError(f"{label} does not hold a JSON object", hint, details=details)
    return JsonFile(label, values, hint)


@dataclass(frozen=True)
class ComponentFolder:
    """Folder with the files of one component of a checkpoint, maybe in another repository."""

    part: str
    """Name of the component."""
    root: Path
    """Folder of the checkpoint, or snapshot folder of another repository of the hub."""
    subfolder: str
    """Path of the component's files relative to `root`; empty if they are in `root` itself."""
    repository: str | None = None
    """Hub id of the other repository; None: the component is in the checkpoint's own folder."""
    variant: str | None = None
    """Variant that the checkpoint's index names for the component; None: no variant is named."""

    @property
    def path(self) -> Path:
        """Path of the folder that has the component's files."""
        return self.root / self.subfolder

    def path_in_root(self, name: str) -> str:
        """Return the path of a component's file, or a pattern of paths, relative to `root`.

        Args:
            name: Name of a file of the component, or a pattern.
        """
        return f"{self.subfolder}/{name}" if self.subfolder else name

    def label(self, name: str) -> str:
        """Return the name of a component's file in messages, such as `vae/config.json`.

        If the file is in another repository, `of OWNER/NAME` follows.

        Args:
            name: Name of a file of the component.
        """
        path = self.path_in_root(name)
        return path if self.repository is None else f"{path} of {self.repository}"

    def hint(self, name: str = "") -> str:
        """Return the command that downloads a file again; "" for files in the checkpoint's folder.

        Args:
            name: Name of a file of the component; empty: all files of the repository.
        """
        if self.repository is None:
            return ""
        file = f" {shlex.quote(self.path_in_root(name))}" if name else ""
        return f"hf download {shlex.quote(self.repository)}{file} --force-download"

    def read_json(self, name: str) -> JsonFile:
        """Read a JSON object from a file of the component.

        Args:
            name: Name of the file.

        Raises:
            ModelError: The file is missing or damaged.
        """
        return read_json(self.path, name, label=self.label(name), hint=self.hint(name))


# --- weight files ---------------------------------------------------------------------------------

_WITHOUT_WEIGHTS = ("processor", "extractor", "guider", "guider_2", "scheduler")


def has_weights(part: str) -> bool:
    """Whether a component has weights; tokenizers, processors, guiders and schedulers have none."""
    return not is_tokenizer(part) and not part.endswith(_WITHOUT_WEIGHTS)


def is_tokenizer(part: str) -> bool:
    """Whether a component is a text tokenizer.

    False for an audio tokenizer, which is a network with weights.
    """
    return part.startswith(("tokenizer", "text_tokenizer"))


class WeightNames(NamedTuple):
    """File names of a component's weights in one variant."""

    single: str
    """Name of the file if one file contains all weights."""
    shards: tuple[str, str]
    """Patterns of the names of shards: the one that diffusers uses now, and the one that it used
    until 2024."""
    indices: tuple[str, str]
    """Names of the index file that lists the shards: the one that diffusers uses now, and the one
    that it used until 2024."""


def _weight_stem(part: str) -> str:
    # transformers saves text and image encoders, and diffusers all other components. The two
    # libraries use different file names.
    return "model" if "_encoder" in part else "diffusion_pytorch_model"


def weight_names(part: str, variant: str | None) -> WeightNames:
    """Return the names that the weight files of a component can have.

    Args:
        part: Name of the component.
        variant: Variant of the files, such as fp16; None: the plain files.
    """
    stem, tag = _weight_stem(part), f".{variant}" if variant else ""
    return WeightNames(
        f"{stem}{tag}.safetensors",
        (f"{stem}{tag}-?????-of-?????.safetensors", f"{stem}-?????-of-?????{tag}.safetensors"),
        (f"{stem}.safetensors.index{tag}.json", f"{stem}.safetensors{tag}.index.json"),
    )


def weights_pattern(component: ComponentFolder) -> str:
    """Return a short pattern of a component's weight files, for `hf download --include`."""
    if component.subfolder:
        return component.path_in_root("*")
    return f"{_weight_stem(component.part)}*.safetensors*"


def _file_names(component: ComponentFolder) -> list[str]:
    # A named pipe is left out, because reading it would never end.
    return sorted(path.name for path in component.path.glob("*") if path.is_file())


def _has_names(component: ComponentFolder, variant: str | None) -> bool:
    known = weight_names(component.part, variant)
    names = _file_names(component)
    return any(name == known.single or name in known.indices for name in names)


def variant_of(component: ComponentFolder, variant: str | None) -> str | None:
    """Return the variant of a component's weight files, such as fp16; None: the plain files.

    If a component has files of the requested variant, the result is this variant. If it has only
    plain files, the result is None, but (as in diffusers) only if another component of the
    checkpoint has the variant, or if the component is in another repository. In all other cases the
    result is the requested variant, and `weight_files` then raises an error about missing files.

    Args:
        component: Folder of the component.
        variant: Requested variant, such as fp16. None: the variant that the index names.
    """
    if variant is None:
        return component.variant
    if _has_names(component, variant):
        return variant
    root = component.root
    folders = {path.parent.name for path in root.glob("*/*.safetensors*")} - {component.subfolder}
    others = [ComponentFolder(name, root, name) for name in folders]
    is_mixed = component.repository is not None or any(_has_names(o, variant) for o in others)
    return None if is_mixed and _has_names(component, None) else variant


def weight_files(component: ComponentFolder, variant: str | None) -> list[Path]:
    """Return the weight files that diffusers or transformers reads for a component.

    The result is a single file, or the shards that an index lists. If both exist, diffusers reads
    the shards, and transformers reads the single file.

    Args:
        component: Folder of the component.
        variant: Requested variant; see `variant_of`.

    Raises:
        ModelError: The component has no weight files, or the index is damaged.
    """
    part, variant = component.part, variant_of(component, variant)
    names, known = _file_names(component), weight_names(part, variant)
    index = next((each for each in known.indices if each in names), None)
    if index is not None and not ("_encoder" in part and known.single in names):
        return [component.path / name for name in _shards(component, index, known.shards, names)]
    if known.single in names:
        return [component.path / known.single]
    details = {"component": part, "variant": variant}
    missing = f"{component.label(known.single)} is missing"
    if others := [component.path_in_root(name) for name in names if not name.endswith(".json")]:
        there = f"{missing}; there are {short_repr(', '.join(others))}"
        raise ModelError(there, _WEIGHTS_HINT, details=details)
    raise ModelError(missing, component.hint(), details=details)


def _shards(
    component: ComponentFolder, name_of_index: str, patterns: tuple[str, ...], names: list[str]
) -> list[str]:
    index = component.read_json(name_of_index)
    listed = index.values.get("weight_map")
    files = listed.values() if isinstance(listed, dict) else [listed]
    for name in files:  # an untrusted index could name a pickle, or a file outside the folder
        if not any(fnmatch.fnmatchcase(str(name), pattern) for pattern in patterns):
            raise index.error(
                f"the index lists {short_repr(name)}, which is not the name of a shard"
            )
    shards = sorted({*map(str, files)})
    # An interrupted download can leave shards missing.
    if missing := {*shards} - {*names}:
        raise index.error(
            f"{len(missing)} of {len(shards)} shards are missing",
            details={
                "missing": [component.path_in_root(name) for name in sorted(missing)],
                "missing_shards": len(missing),
                "shards": len(shards),
            },
        )
    return shards


def read_dtypes(path: Path) -> list[str]:
    """Return the dtype of each tensor in a safetensors file, as the file writes it, such as BF16.

    Raises:
        ModelError: The file cannot be read, or is damaged.
    """
    return [entry["dtype"] for entry in read_safetensors_header(path)[1].values()]


def fingerprint(files: Mapping[str, Path]) -> str:
    """Return the SHA-256 of the headers of weight files and of 64 bytes of each tensor, in hex.

    This reads a few hundred KB instead of several GB. Models that were trained differently have
    different fingerprints, because training changes every weight. To detect a change of any byte,
    use `Checkpoint.file_hashes`.

    Args:
        files: Weight files by name. The name, such as `vae/model.safetensors`, is hashed, too.

    Raises:
        ModelError: A file cannot be read, or is damaged.
    """
    digest = hashlib.sha256()
    # Sort the names as paths: by folder first, then by file name.
    for name in sorted(files, key=PurePosixPath):
        path = files[name]
        digest.update(name.encode() + b"\0")
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
        # `safe_open` also checks that the tensors fill the file without gaps.
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
