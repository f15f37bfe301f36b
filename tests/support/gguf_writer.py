"""Writer of GGUF files for tiny denoisers, with the tensor names that published files have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import gguf
import numpy as np
import torch

#: String replacements that turn diffusers' tensor names into the original names of Wan and
#: LTX-Video. The replacements are applied in this order.
ORIGINAL_NAMES: Mapping[str, Mapping[str, str]] = {
    "WanTransformer3DModel": {
        "condition_embedder.time_embedder.linear_1": "time_embedding.0",
        "condition_embedder.time_embedder.linear_2": "time_embedding.2",
        "condition_embedder.text_embedder.linear_1": "text_embedding.0",
        "condition_embedder.text_embedder.linear_2": "text_embedding.2",
        "condition_embedder.time_proj": "time_projection.1",
        ".norm2.": ".norm3.",
        ".attn1.": ".self_attn.",
        ".attn2.": ".cross_attn.",
        ".to_q.": ".q.",
        ".to_k.": ".k.",
        ".to_v.": ".v.",
        ".to_out.0.": ".o.",
        "ffn.net.0.proj": "ffn.0",
        "ffn.net.2": "ffn.2",
        ".scale_shift_table": ".modulation",
        "scale_shift_table": "head.modulation",
        "proj_out": "head.head",
    },
    "LTXVideoTransformer3DModel": {
        "proj_in": "patchify_proj",
        "time_embed": "adaln_single",
        "norm_q": "q_norm",
        "norm_k": "k_norm",
    },
}
#: Byte offsets of the 16-bit scales in a block, for the quantised types that the package gguf
#: cannot write.
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def original_name(kind: str, name: str) -> str:
    """Return the name that published files have for the weight `name` of diffusers."""
    for own, original in ORIGINAL_NAMES[kind].items():
        name = name.replace(own, original)
    return name


def save_gguf(
    checkpoint: Path,
    file: Path,
    kind: str = "Q8_0",
    *,
    part: str = "transformer",
    is_original: bool = True,
    change: Callable[[dict[str, tuple[Any, str]]], None] = lambda _: None,
) -> Path:
    """Save a denoiser of `checkpoint` as a GGUF file, and return the path.

    The linear layers get the GGUF type `kind`.

    Biases, norms, convolutions, and layers that are too narrow for the type are stored as F32.
    `change` is called with the arrays and types, and may modify them before the file is written.
    """
    index = json.loads((checkpoint / "model_index.json").read_text())
    model = getattr(diffusers, index[part][1]).from_pretrained(checkpoint / part)
    linear = {f"{name}.weight" for name, each in model.named_modules() if _is_linear(each)}
    tensors: dict[str, tuple[Any, str]] = {}
    for name, tensor in model.state_dict().items():
        saved = original_name(type(model).__name__, name) if is_original else name
        array = tensor.float().numpy()
        numbers = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
        fits = name in linear and array.shape[-1] % numbers == 0
        tensors[saved] = array, kind if fits else "F32"
    change(tensors)
    file.parent.mkdir(exist_ok=True)
    write_gguf(file, tensors)
    return file


def write_gguf(file: Path, tensors: Mapping[str, tuple[Any, str]]) -> None:
    """Write arrays as tensors of a GGUF file, each with its type."""
    writer = gguf.GGUFWriter(file, "wan")
    writer.add_string("general.name", "tiny")
    writer.add_array("general.tags", ["a", "b"])
    for name, (array, kind) in tensors.items():
        number = gguf.GGMLQuantizationType[kind]
        if kind in ("F32", "F16"):
            writer.add_tensor(name, array.astype({"F32": "float32", "F16": "float16"}[kind]))
        else:
            writer.add_tensor(name, _quantised(array, kind), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _quantised(array: Any, kind: str) -> Any:
    number = gguf.GGMLQuantizationType[kind]
    if kind not in _SCALES:
        return gguf.quants.quantize(array, number)
    # The package gguf cannot quantise to these types. So the blocks are random bytes, with scales
    # that are valid numbers.
    numbers, size = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (array.size // numbers, size), dtype=np.uint8)
    for start in _SCALES[kind]:
        scales = rng.normal(0, 1e-4, len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(*array.shape[:-1], -1)


def _is_linear(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear)
