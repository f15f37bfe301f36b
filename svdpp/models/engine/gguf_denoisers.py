"""Loader of denoisers from GGUF files through diffusers, with a check of each tensor.

diffusers renames the tensors of a file. It only warns if a tensor fits no weight of the model, and
leaves a weight that the file lacks uninitialised. So this module first renames the tensors without
their data, and checks that the new names are exactly the names of the model's weights.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from diffusers import GGUFQuantizationConfig
from diffusers.loaders.single_file_model import (
    SINGLE_FILE_LOADABLE_CLASSES,
    _get_single_file_loadable_mapping_class,
    _should_convert_state_dict_to_diffusers,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from svdpp.errors import ModelError
from svdpp.models.files import library_errors, short_repr
from svdpp.models.gguf_files import DenoiserFile, GgufTensor, read_gguf_header

_DTYPES = {"F32": torch.float32, "F16": torch.float16}
#: Maximum number of tensors that an error's `details` name.
_MAX_NAMED = 20


def load_denoiser(folder: Path, file: DenoiserFile, cls: Any, dtype: torch.dtype) -> Any:
    """Load a denoiser from a GGUF file with diffusers' `from_single_file`, onto the CPU.

    Args:
        folder: Folder of the checkpoint, which has the denoiser's config.
        file: Checked GGUF file.
        cls: Class of the denoiser.
        dtype: Dtype in which the denoiser computes, and of the weights that are not quantised.

    Raises:
        ModelError: Names or shapes of the file's tensors differ from the denoiser's weights.
    """
    with torch.device("meta"):
        module = cls.from_config(cls.load_config(folder / file.part, local_files_only=True))
    converted_tensors(module, file)
    # Hide torch's warning that the memory-mapped file is read-only.
    with warnings.catch_warnings(action="ignore"):
        return cls.from_single_file(
            str(file.path),
            config=str(folder),
            subfolder=file.part,
            quantization_config=GGUFQuantizationConfig(compute_dtype=dtype),
            dtype=dtype,
            local_files_only=True,
        )


def converted_tensors(module: Any, file: DenoiserFile) -> dict[str, torch.Tensor]:
    """Return a GGUF file's tensors, without data, under the names that diffusers gives them.

    As in diffusers, a quantised tensor is a tensor of bytes with the attribute `quant_type`.

    Args:
        module: Denoiser of diffusers. Only the names and shapes of its weights are read.
        file: Checked GGUF file.

    Raises:
        ModelError: Names or shapes of the file's tensors differ from the denoiser's weights.
    """
    cls, label = type(module), file.label
    state = module.state_dict()
    given = {name: _without_data(entry) for name, entry in read_gguf_header(file.path).items()}
    if _should_convert_state_dict_to_diffusers(state, given):
        kind = _get_single_file_loadable_mapping_class(cls)
        convert = SINGLE_FILE_LOADABLE_CLASSES[kind]["checkpoint_mapping_fn"]
        with library_errors(f"{label} for a {cls.__name__}"):
            given = convert(config=module.config, checkpoint=given)
    ignored = tuple(module._keys_to_ignore_on_load_unexpected or ())
    missing = [name for name, _ in module.named_parameters() if name not in given]
    strange = [
        name
        for name in given
        if name not in state and not any(re.search(pattern, name) for pattern in ignored)
    ]
    for problem, names in (("the file lacks", missing), (f"a {cls.__name__} has no", strange)):
        if names:
            count = f" ({len(names)} such tensors)" if len(names) > 1 else ""
            raise ModelError(
                f"{label}: {problem} {short_repr(names[0])}{count}",
                f"use a file of the checkpoint's own model, a {cls.__name__}",
                details={"tensors": names[:_MAX_NAMED], "count": len(names)},
            )
    given = {name: tensor for name, tensor in given.items() if name in state}
    for name, tensor in given.items():
        _check_tensor(module, name, tensor, state[name].shape, label)
    return given


def _without_data(entry: GgufTensor) -> torch.Tensor:
    if not entry.is_quantised:
        return torch.empty(entry.shape, dtype=_DTYPES[entry.type.name], device="meta")
    # Imported here, because both imports need gguf, an optional dependency.
    from diffusers.quantizers.gguf.utils import GGUFParameter
    from gguf import GGMLQuantizationType

    data = torch.empty(entry.byte_shape, dtype=torch.uint8, device="meta")
    kind = GGMLQuantizationType[entry.type.name]
    parameter: torch.Tensor = GGUFParameter(data, quant_type=kind)
    return parameter


def _check_tensor(module: Any, name: str, tensor: Any, expected: torch.Size, label: str) -> None:
    shape = tuple(getattr(tensor, "quant_shape", tensor.shape))
    if shape != tuple(expected):
        raise ModelError(
            f"{label}: {short_repr(name)} has the shape {list(shape)}, but the checkpoint's "
            f"config says {list(expected)}",
            "use a file of the same model as the checkpoint",
            details={"tensor": name, "shape": list(shape), "config_shape": list(expected)},
        )
    if hasattr(tensor, "quant_type") and not _can_be_quantised(module, name):
        kind = tensor.quant_type.name
        raise ModelError(
            f"{label}: {short_repr(name)} is of the type {kind}, which diffusers reads in linear "
            "layers only",
            "use a file that has this tensor as F32 or F16",
            details={"tensor": name, "type": kind},
        )


def _can_be_quantised(module: Any, name: str) -> bool:
    """Whether diffusers can read a weight in quantised form.

    diffusers computes with quantised weights in linear layers only. It also accepts quantised
    weights of the layers that it keeps in float32, because it dequantises them when it loads them.
    """
    if {*(module._keep_in_fp32_modules or ())}.intersection(name.split(".")):
        return True
    path, _, kind = name.rpartition(".")
    return kind == "weight" and isinstance(module.get_submodule(path), torch.nn.Linear)


def quantise_fake(
    module: Any, file: DenoiserFile, dtype: torch.dtype, fake: FakeTensorMode
) -> None:
    """Replace the linear layers whose weights a GGUF file quantises by fake quantised layers.

    Args:
        module: Denoiser with fake weights, which is changed. Weights that are quantised in the file
            become fake tensors of bytes.
        file: Checked GGUF file.
        dtype: Dtype in which the quantised layers compute.
        fake: Fake tensor mode in which `module` was created.

    Raises:
        ModelError: Names or shapes of the file's tensors differ from the denoiser's weights.
    """
    from diffusers.quantizers.gguf.utils import GGUFLinear  # imports gguf, an optional dependency

    for name, tensor in converted_tensors(module, file).items():
        kept = {*(module._keep_in_fp32_modules or ())}.intersection(name.split("."))
        if not hasattr(tensor, "quant_type") or kept:
            continue
        path = name.rpartition(".")[0]
        parent, _, child = path.rpartition(".")
        old = module.get_submodule(path)
        sizes = old.in_features, old.out_features
        new = GGUFLinear(*sizes, bias=False, compute_dtype=dtype, device="meta")
        with fake:
            weight: Any = torch.empty(tensor.shape, dtype=torch.uint8)
        weight.quant_type, weight.as_tensor = tensor.quant_type, lambda weight=weight: weight
        new._parameters["weight"], new._parameters["bias"] = weight, old.bias
        setattr(module.get_submodule(parent), child, new)
