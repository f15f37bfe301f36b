"""Search for GGUF denoisers, and checks of their headers before any rank starts; imports no torch.

A GGUF file is untrusted, and the package gguf trusts the counts in its header. So this module reads
the header first, with limits. No code from the file is run.
"""

from __future__ import annotations

import importlib.util
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from svdpp.config import Denoiser, ModelConfig
from svdpp.errors import ModelError, RequestError
from svdpp.models.added_files import check_experts, find_file
from svdpp.models.files import display_name, short_repr

# --- types of tensors in GGUF files --------------------------------------------------------------


class TensorType(NamedTuple):
    """Data type of a tensor in a GGUF file, which stores values in blocks of a fixed size."""

    name: str
    numbers: int
    """Number of values in a block. It must divide the size of a tensor's last axis."""
    size: int
    """Size of a block in bytes."""


#: Tensor types that diffusers can read, by their type number in GGUF files.
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
}
#: Names of the tensor types that diffusers cannot read, by type number, for error messages.
OTHER_TYPES = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}


class GgufTensor(NamedTuple):
    """Type and shape of a tensor, from the header of a GGUF file."""

    type: TensorType
    shape: tuple[int, ...]
    """Sizes of the axes in torch's order, which is the reverse of the file's order."""

    @property
    def is_quantised(self) -> bool:
        """Whether diffusers dequantises a GGUF tensor at each use: all types except F32 and F16."""
        return self.type.name not in ("F32", "F16")

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """Shape of a GGUF tensor's data as uint8: the last axis counts bytes instead of values."""
        return (*self.shape[:-1], self.shape[-1] // self.type.numbers * self.type.size)

    @property
    def num_bytes(self) -> int:
        """Size of a tensor in a GGUF file, in bytes."""
        return math.prod(self.byte_shape)


# --- header of a GGUF file -----------------------------------------------------------------------

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: Limits for the counts in a header, which is untrusted. For comparison, a GGUF file of Wan 2.2
#: A14B has 1095 tensors and a few dozen metadata keys.
MAX_TENSORS = 2**16
_MAX_KEYS = 2**12
_MAX_TEXT_BYTES = 2**16
_MAX_ELEMENTS = 2**20
_MAX_DIMS = 8
_MAX_ALIGNMENT = 2**16
_ALIGNMENT_KEY = "general.alignment"
#: Sizes in bytes of metadata values, by type number. Texts and arrays have no fixed size.
_VALUE_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _TEXT, _ARRAY = 4, 8, 9


class _Reader:
    """Reader of a GGUF header. It raises ModelError if the file ends within the header."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = os.fstat(file.fileno()).st_size

    def take(self, count: int) -> bytes:
        data = self._file.read(count) if count <= self.size else b""
        if len(data) < count:
            raise ModelError("the file ends within its header", _DAMAGED)
        return data

    def number(self, size: int = 8) -> int:
        """Read an unsigned integer of `size` bytes from a GGUF header."""
        return int.from_bytes(self.take(size), "little")

    def bounded(self, what: str, limit: int, size: int = 8) -> int:
        number = self.number(size)
        if number > limit:
            details = {"what": what, "value": number, "limit": limit}
            raise ModelError(
                f"{what} is {number}, but at most {limit} is allowed", _DAMAGED, details=details
            )
        return number

    def text(self, what: str) -> str:
        data = self.take(self.bounded(f"the length of {what}", _MAX_TEXT_BYTES))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{what} is not UTF-8", _DAMAGED) from error

    def skip_value(self, kind: int, key: str) -> None:
        if kind in _VALUE_SIZES:
            self.take(_VALUE_SIZES[kind])
        elif kind == _TEXT:
            self.take(self.bounded(f"the length of {short_repr(key)}", self.size))
        elif kind == _ARRAY and (element := self.number(4)) != _ARRAY:
            for _ in range(self.bounded(f"the length of {short_repr(key)}", _MAX_ELEMENTS)):
                self.skip_value(element, key)
        else:
            raise ModelError(f"the value of {short_repr(key)} has an unknown type", _DAMAGED)

    @property
    def position(self) -> int:
        return self._file.tell()


def read_gguf_header(path: Path) -> dict[str, GgufTensor]:
    """Read the header of a GGUF file, and check that the file contains all tensors of the header.

    Args:
        path: Path of the file.

    Returns:
        Type and shape of each tensor, by its name in the file.

    Raises:
        ModelError: The file is not a GGUF file, is damaged or truncated, or has a tensor of a type
            that diffusers cannot read.
        OSError: The file cannot be read.
    """
    if not path.is_file():  # reading a pipe would never end
        raise ModelError("the path is not a regular file")
    with path.open("rb") as file:
        reader = _Reader(file)
        if reader.size < len(_MAGIC) or reader.take(len(_MAGIC)) != _MAGIC:
            raise ModelError("the file is not a GGUF file: it does not start with GGUF", _DAMAGED)
        version = reader.number(4)
        if version not in _VERSIONS:
            versions = " and ".join(map(str, _VERSIONS))
            raise ModelError(
                f"GGUF version {version} is not supported: svdpp reads little-endian files of "
                f"version {versions}",
                "download a newer file",
                details={"version": version, "versions": list(_VERSIONS)},
            )
        num_tensors = reader.bounded("the number of tensors", MAX_TENSORS)
        alignment = _skip_values(reader, reader.bounded("the number of keys", _MAX_KEYS))
        entries = [_read_entry(reader) for _ in range(num_tensors)]
        begin = -(-reader.position // alignment) * alignment
        size = reader.size
    tensors: dict[str, GgufTensor] = {}
    for name, tensor, offset in entries:
        if name in tensors:
            raise ModelError(f"the tensor {short_repr(name)} occurs twice", _DAMAGED)
        if begin + offset + tensor.num_bytes > size:
            raise ModelError(
                f"the file is truncated: it ends within the tensor {short_repr(name)}",
                _DAMAGED,
                details={"tensor": name, "file_bytes": size, "offset": begin + offset},
            )
        tensors[name] = tensor
    if not tensors:
        raise ModelError("the file has no tensors", _DAMAGED)
    return tensors


def _skip_values(reader: _Reader, count: int) -> int:
    """Skip the `count` metadata entries of a GGUF header, but read the alignment from them.

    Returns:
        Alignment in bytes: the offset of each tensor's data is a multiple of it. 32 by default.
    """
    alignment, keys = 32, set()
    for _ in range(count):
        key, kind = reader.text("a key"), reader.number(4)
        if key in keys:
            raise ModelError(f"the key {short_repr(key)} occurs twice", _DAMAGED)
        keys.add(key)
        if (key, kind) == (_ALIGNMENT_KEY, _UINT32):
            alignment = reader.bounded(_ALIGNMENT_KEY, _MAX_ALIGNMENT, 4)
        else:
            reader.skip_value(kind, key)
    if alignment.bit_count() != 1:
        raise ModelError(
            f"{_ALIGNMENT_KEY} is {alignment}, not a power of two",
            _DAMAGED,
            details={"alignment": alignment},
        )
    return alignment


def _read_entry(reader: _Reader) -> tuple[str, GgufTensor, int]:
    """Read the next entry of a GGUF header: a tensor's name, type, shape and offset.

    Returns:
        Name of the tensor; its type and shape; and its offset in bytes from the beginning of the
        tensors' data.
    """
    name = reader.text("the name of a tensor")
    num_dims = reader.bounded(f"the number of axes of {short_repr(name)}", _MAX_DIMS, 4)
    dims = struct.unpack(f"<{num_dims}Q", reader.take(8 * num_dims))
    number, offset = reader.number(4), reader.number()
    if number not in TENSOR_TYPES:
        other = OTHER_TYPES.get(number, f"number {number}")
        read = ", ".join(each.name for each in TENSOR_TYPES.values())
        raise ModelError(
            f"the tensor {short_repr(name)} is of the type {other}, which diffusers does not read",
            f"use a file of another quantisation: {read}",
            details={"tensor": name, "type": other},
        )
    kind, shape = TENSOR_TYPES[number], dims[::-1]
    if not shape or 0 in shape or shape[-1] % kind.numbers:
        raise ModelError(
            f"the tensor {short_repr(name)} has the shape {list(shape)}, which {kind.name} cannot "
            "have",
            _DAMAGED,
            details={"tensor": name, "shape": list(shape), "type": kind.name},
        )
    return name, GgufTensor(kind, shape), offset


_DAMAGED = "the file is damaged or not a GGUF file: download it again"


# --- search for GGUF files -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DenoiserFile:
    """GGUF denoiser whose file has been found and whose header has been checked."""

    denoiser: Denoiser
    """Requested denoiser, completed with the file's SHA-256 and absolute path (or commit on the
    hub)."""
    path: Path

    @property
    def part(self) -> str:
        """Name of the checkpoint's component that the GGUF file replaces."""
        return self.denoiser.part

    @property
    def identity(self) -> str:
        """Text that identifies a GGUF denoiser by file content and component, not by location."""
        assert self.denoiser.sha256 is not None
        return f"{self.denoiser.sha256[:16]}:{self.part}"

    @property
    def label(self) -> str:
        """Name of the GGUF file in messages."""
        return f"`denoisers` {display_name(self.denoiser.name)}"


def check_denoisers(model: ModelConfig, checkpoint: Any) -> None:
    """Check that a model can load the requested GGUF denoisers, without looking at the files.

    Args:
        model: Model with the requested denoisers.
        checkpoint: Checkpoint of the model, without weights.

    Raises:
        RequestError: diffusers loads no GGUF files for the family, the model is quantised by
            TorchAO, or the package gguf is not installed. Or the model has two experts, and a file
            names none. Or the model has one denoiser, and a file names an expert. Or two files are
            for one denoiser. Or an environment variable would make diffusers run code from the hub.
    """
    if not model.denoisers:
        return
    if not checkpoint.spec.gguf:
        kind = checkpoint.spec.denoiser.strip("()").replace("|", " or ")
        reason = (
            f"diffusers loads no {kind} from a GGUF file"
            if checkpoint.spec.modular is None
            else "svdpp loads no GGUF files into modular pipelines"
        )
        raise RequestError(
            f"{checkpoint.label} takes no `denoisers`: {reason}",
            "leave `denoisers` out; svdpp models lists the families that take GGUF files",
        )
    if checkpoint.int8_denoisers:
        raise RequestError(
            f"{checkpoint.label} takes no `denoisers`: its own denoisers are quantised by TorchAO",
            "use the original checkpoint, which is not quantised",
        )
    if importlib.util.find_spec("gguf") is None:
        raise RequestError("`denoisers` needs the package gguf", "pip install 'svdpp[gguf]'")
    if os.environ.get(_KERNELS_VARIABLE, "false").lower() in ("1", "true", "yes"):
        raise RequestError(
            f"{_KERNELS_VARIABLE} is set: diffusers would run a kernel that it downloads",
            f"unset {_KERNELS_VARIABLE}: svdpp runs no code from the hub",
        )
    check_experts(model.denoisers, checkpoint)
    parts = [denoiser.part for denoiser in model.denoisers]
    if len(parts) > len(set(parts)):
        hint = "name one file for each denoiser"
        raise RequestError("`denoisers` names two files for one denoiser", hint)


#: Environment variable that makes diffusers' GGUF layers load the code `Isotr0py/ggml` from the
#: hub.
_KERNELS_VARIABLE = "DIFFUSERS_GGUF_CUDA_KERNELS"


def find_denoisers(model: ModelConfig, *, are_hashed: bool = True) -> tuple[DenoiserFile, ...]:
    """Find the GGUF files of a model's denoisers; files on the hub are downloaded.

    Args:
        model: Model with the requested denoisers.
        are_hashed: Whether the SHA-256 of each whole file is computed.

    Raises:
        ModelError: A file does not exist or is damaged, or its SHA-256 is not the requested one.
    """
    files = []
    for denoiser in model.denoisers:
        found, path, _ = find_file(
            denoiser,
            read_gguf_header,
            default="",
            local_files_only=model.local_files_only,
            is_hashed=are_hashed,
        )
        files.append(DenoiserFile(denoiser=found, path=path))
    return tuple(files)
