"""Checks of the configs and files of denoisers that TorchAO quantised to int8; imports no torch.

torchao creates objects of the classes that the config and the weight files' headers name. As a
checkpoint is untrusted, only the classes of int8 weights with one scale for each row are allowed.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from svdpp.errors import ModelError, RequestError
from svdpp.models.files import QUANTISED_HINT, JsonFile, read_safetensors_header, short_repr

#: Key in a component's config. Its value says how the weights are quantised.
QUANTISATION_KEY = "quantization_config"
#: Reasons why svdpp does not run denoisers of other quantisation methods, by `quant_method`.
_REASONS = {
    "bitsandbytes": "diffusers loads them only on GPUs, where svdpp has no test that compares "
    "clips of several ranks with those of one rank",
    "quanto": "diffusers has deprecated this method",
}
_NOT_COMPARED = (
    "svdpp has no test that compares their clips of several ranks with those of one rank"
)

# --- config ---------------------------------------------------------------------------------------

_KIND = "Int8WeightOnlyConfig"
#: The two values of `quant_type` that svdpp runs: int8 weights with one scale for each row. They
#: differ in `set_inductor_config`, which has no effect when a checkpoint is loaded.
_QUANT_TYPES = [
    {
        "default": {
            "_type": _KIND,
            "_version": 2,
            "_data": {
                "granularity": {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}},
                "group_size": None,
                "set_inductor_config": is_set,
            },
        }
    }
    for is_set in (True, False)
]


def check_quantisation(config: JsonFile, place: str, value: Any, *, is_denoiser: bool) -> None:
    """Check, by its config, that a component is quantised in the only way that svdpp runs.

    The component must be a denoiser, and TorchAO must have quantised its weights, but not its
    activations, to int8 with one scale for each row.

    Args:
        config: Config of the component.
        place: Path of the value in the config, such as `text_config.quantization_config`.
        value: Value of `quantization_config`, not None.
        is_denoiser: Whether the component is a denoiser.

    Raises:
        ModelError: The weights are quantised in another way, or are not those of a denoiser.
    """
    values = value if isinstance(value, Mapping) else {}
    method = values.get("quant_method")
    details = {"key": place, "quant_method": method and short_repr(method)}
    may_be_quantised = is_denoiser and place == QUANTISATION_KEY
    if may_be_quantised and method == "torchao":
        if _is_int8_of_rows(values):
            return
        kind = short_repr(values.get("quant_type"))
        raise config.error(
            f"svdpp runs denoisers quantised by TorchAO with TorchAoConfig({_KIND}()), but not "
            f"with {kind}: {_NOT_COMPARED}",
            QUANTISED_HINT,
            details={**details, "quant_type": kind},
        )
    by = "" if method is None else f" by {short_repr(method)}"
    reason = "only denoisers may be quantised, and only by TorchAO to int8"
    if may_be_quantised:
        reason = _REASONS.get(str(method), _NOT_COMPARED)
    raise config.error(
        f"the key {short_repr(place)} is not supported, because svdpp runs no weights that are "
        f"quantised{by}: {reason}",
        QUANTISED_HINT,
        details=details,
    )


def _is_int8_of_rows(values: Mapping[str, Any]) -> bool:
    kept = values.get("modules_to_not_convert") or []
    return (
        values.keys() <= {"quant_method", "quant_type", "modules_to_not_convert"}
        and values.get("quant_type") in _QUANT_TYPES
        and isinstance(kept, list)
        and all(isinstance(name, str) for name in kept)
    )


def check_torchao(model_label: str, parts: Iterable[str]) -> None:
    """Check that the package torchao is installed if a denoiser needs it.

    Args:
        model_label: Name of the model in messages.
        parts: Names of the denoisers that are quantised by TorchAO.

    Raises:
        RequestError: The package is not installed.
    """
    if any(parts) and importlib.util.find_spec("torchao") is None:
        raise RequestError(
            f"{model_label} is quantised by TorchAO and needs the package torchao",
            "pip install 'svdpp[torchao]'",
        )


# --- headers of weight files ----------------------------------------------------------------------

#: Dtypes in which a quantised layer can compute. The keys are the names that torchao writes into
#: the metadata, and the values are the names in `ModelConfig.dtype`.
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
#: Names of float32, float16 and bfloat16 in safetensors files.
_FLOATS = ("F32", "F16", "BF16")
#: Metadata of a tensor that is not quantised.
_PLAIN = {"_type": "Tensor"}


def check_int8_weights(part: str, paths: Iterable[Path], dtype: str) -> None:
    """Check the weight files of a denoiser that TorchAO has quantised, and its compute dtype.

    Quantised layers compute in the dtype that the model had when it was quantised. Another
    requested dtype is refused, because only the layers that are not quantised would compute in it.

    Args:
        part: Name of the denoiser.
        paths: All weight files of the denoiser.
        dtype: Requested dtype, such as bf16.

    Raises:
        ModelError: A file is not in torchao's format, a tensor is missing or not listed in the
            metadata, or a weight is quantised in a way that svdpp does not run.
        RequestError: The quantised layers compute in another dtype than `dtype`.
    """
    entries: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    for path in paths:
        header, tensors = read_safetensors_header(path)
        own = json.loads(header).get("__metadata__") or {}
        # torchao writes the metadata of all tensors into each shard, so all shards must agree.
        if metadata and own != metadata:
            raise _error(part, f"the metadata of {path.name} differ from those of other shards")
        metadata, entries = own, entries | tensors
    dtypes = set()
    for name in _json(part, metadata, "tensor_names", list):
        described = _json(part, metadata, name, dict)
        if described != _PLAIN:
            dtypes.add(_int8_dtype(part, name, described, entries))
        elif entries.pop(name, {}).get("dtype") not in _FLOATS:
            raise _error(part, f"{short_repr(name)} is missing or is not floating-point", name)
    if entries:
        name = min(entries)
        raise _error(part, f"the metadata do not list {short_repr(name)}", name)
    if others := sorted(dtypes - {dtype}):
        raise RequestError(
            f"`dtype` is {dtype}, but {part} was quantised in {' and '.join(others)}",
            f"use `dtype` {others[0]}",
            details={"component": part, "dtype": dtype, "quantised_in": others},
        )


def _json(part: str, metadata: Mapping[str, Any], key: Any, kind: type) -> Any:
    """Parse the JSON text at a key of TorchAO's metadata; return its value, which must be a `kind`.

    Raises:
        ModelError: The key is missing, or its value is not JSON of the type `kind`.
    """
    try:
        value = json.loads(metadata[key])
    except (KeyError, TypeError, ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise _error(part, f"the metadata do not describe {short_repr(key)}", str(key))
    return value


def _int8_dtype(part: str, name: str, described: Mapping[str, Any], entries: dict[str, Any]) -> str:
    """Check the tensors of an int8 weight; return the dtype in which its layer computes.

    A weight is stored as three tensors: int8 values, scales and zero points. They are removed from
    `entries`, so that after all weights have been checked, only tensors that the metadata do not
    list are left there.

    Args:
        part: Name of the denoiser.
        name: Name of the weight.
        described: Entry of the weight in torchao's metadata.
        entries: Header entries of the tensors that are not checked yet, by tensor name.

    Returns:
        Name of the dtype, such as bf16.

    Raises:
        ModelError: The weight is quantised in a way that svdpp does not run.
    """
    path, _, weight = name.rpartition(".")
    names = ("qdata", "scale", "zero_point")
    tensors = [entries.pop(f"{path}._{weight}_{each}", {}) for each in names]
    shape = tensors[0].get("shape") or []
    rows = [*shape[:1], 1]
    has_tensors = (
        len(shape) == 2
        and [each.get("shape") for each in tensors] == [shape, rows, rows]
        and tensors[0]["dtype"] == tensors[2]["dtype"] == "I8"
        and tensors[1]["dtype"] in _FLOATS
    )
    found, values = described.get("_tensor_data_names"), described.get("_data")
    found = sorted(map(str, found)) if isinstance(found, list) else None
    for number, dtype in _DTYPES.items() if has_tensors else ():
        expected = {
            "act_quant_kwargs": None,
            "block_size": [1, shape[1]],
            "dtype": {"_type": "torch.dtype", "_data": number},
            "reduce_range": False,
        }
        is_known = (described.get("_type"), values) == ("Int8Tensor", expected)
        if is_known and found == sorted(names):
            return dtype
    raise _error(part, f"{short_repr(name)} is not a weight that {_KIND} quantised", name)


def _error(part: str, problem: str, tensor: str | None = None) -> ModelError:
    details = {"component": part} if tensor is None else {"component": part, "tensor": tensor}
    hint = "save the denoiser again with diffusers' save_pretrained and torchao 0.18"
    return ModelError(f"{part}: {problem}", hint, details=details)
