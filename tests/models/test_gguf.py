"""Ranks with a denoiser from a GGUF file give the bits of diffusers' `__call__` with that file."""

from __future__ import annotations

import importlib.util
import math
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import diffusers
import gguf
import numpy as np
import pytest
import torch
from diffusers.loaders.single_file_model import _get_single_file_loadable_mapping_class
from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES, GGUFLinear

from svdpp.config import ClipRequest, Denoiser, Lora, LtxSampling, ModelConfig
from svdpp.config.families.registry import FAMILY_SPECS
from svdpp.errors import ModelError, RequestError
from svdpp.models import memory
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.gguf_files import OTHER_TYPES, TENSOR_TYPES, find_denoisers, read_gguf_header
from svdpp.serve.request_schema import Capabilities
from svdpp.verification.reference import Reference
from tests.models.test_registry import TinyModels
from tests.support.builders import save_tiny_lora
from tests.support.family_case import STEPS, Case, size
from tests.support.gguf_writer import save_gguf, write_gguf
from tests.support.range_checks import (
    TinyModel,
    check_every_cut,
    loaded,
    ranks,
    read_folder,
    reference_clip,
    whole_clip,
)
from tests.support.tiny_families import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

REQUEST = ClipRequest(seed=3, prompt="a cat")
CASES = {"wan": Case("wan", size(32, 32, 5)), "ltx": Case("ltx", size(32, 32, 9))}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="session")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a tiny Wan with two experts, whose layers fit the block size of GGUF (32)."""
    return save_tiny("wan", tmp_path_factory.mktemp("wan"), width=4, boundary_ratio=0.875)


@pytest.fixture(scope="session")
def ltx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a tiny LTX-Video, whose layers fit the block size of GGUF (32)."""
    torch.manual_seed(0)
    transformer = diffusers.LTXVideoTransformer3DModel(
        **{"in_channels": 8, "out_channels": 8, "num_layers": 1, "caption_channels": 16},
        **{"num_attention_heads": 2, "attention_head_dim": 16, "cross_attention_dim": 32},
    )
    return save_tiny("ltx", tmp_path_factory.mktemp("ltx"), transformer=transformer)


def model_with(folder: Path, *files: Path, dtype: Any = "fp32", **more: Any) -> ModelConfig:
    """Return the configuration of a model whose denoisers are GGUF files.

    Files named `high` and `low` are for experts.
    """
    experts = {"high": "high", "low": "low"}
    denoisers = [Denoiser(name=str(each), expert=experts.get(each.stem)) for each in files]  # type: ignore[arg-type]
    return ModelConfig(name=str(folder), denoisers=tuple(denoisers), dtype=dtype, **more)


def sampling_of(folder: Path) -> Any:
    checkpoint = read_folder(folder)
    return checkpoint.resolve_sampling(CASES[checkpoint.family].config())


def run_diffusers_with_gguf(
    folder: Path, files: dict[str, Path], dtype: str = "fp32", tiny: TinyModel | None = None
) -> Any:
    """Make a clip with diffusers, which loads the GGUF files as its manual says.

    Return what `reference_clip` returns.
    """
    plain: Any = ModelConfig(name=str(folder), dtype=dtype)  # type: ignore[arg-type]
    checkpoint = tiny.checkpoint if tiny else read_folder(folder)
    is_from_image = tiny is not None and tiny.source is not None
    reference = Reference(checkpoint, plain, "cpu", from_image=is_from_image)
    for part, file in files.items():
        quantised = type(getattr(reference.pipe, part)).from_single_file(
            str(file),
            quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=DTYPES[dtype]),
            config=str(folder),
            subfolder=part,
            dtype=DTYPES[dtype],
        )
        setattr(reference.pipe, part, quantised)
    if tiny is not None:
        return reference_clip(reference, tiny.sampling, tiny.request(), tiny.source)
    return reference_clip(reference, sampling_of(folder), REQUEST)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_cut_gives_the_bits_of_diffusers_with_the_same_files(
    wan: Path, tmp_path: Path, dtype: str
) -> None:
    high = save_gguf(wan, tmp_path / "high.gguf", "Q8_0")
    low = save_gguf(wan, tmp_path / "low.gguf", "Q4_0", part="transformer_2")
    model, sampling = model_with(wan, high, low, dtype=dtype), sampling_of(wan)
    expected = run_diffusers_with_gguf(wan, {"transformer": high, "transformer_2": low}, dtype)
    rank_for = ranks(find_checkpoint(model), sampling, model=model)
    check_every_cut(rank_for, STEPS, expected, REQUEST, None)
    whole = whole_clip(model, sampling, REQUEST, None)
    assert np.array_equal(whole[1], expected[1])
    first = loaded(rank_for(0, 1))
    assert first.keys() == {"transformer"}
    assert isinstance(first["transformer"].blocks[0].attn1.to_q, GGUFLinear)
    others = (
        run_diffusers_with_gguf(wan, {"transformer": high}, dtype),
        run_diffusers_with_gguf(wan, {}, dtype),
    )
    assert all(not torch.equal(each[0][-1], expected[0][-1]) for each in others)


@pytest.mark.parametrize("is_original", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_files_with_the_names_of_authors_and_of_diffusers_are_read(
    ltx: Path, tmp_path: Path, is_original: bool
) -> None:
    file = save_gguf(ltx, tmp_path / "ltx.gguf", "Q5_0", is_original=is_original)
    model = model_with(ltx, file)
    rank_for = ranks(find_checkpoint(model), sampling_of(ltx), model=model)
    expected = run_diffusers_with_gguf(ltx, {"transformer": file})
    check_every_cut(rank_for, STEPS, expected, REQUEST, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        ("Q4_K", "Q6_K"),
        pytest.param(("Q5_K", "BF16"), marks=pytest.mark.full),
        pytest.param(("Q2_K", "Q3_K"), marks=pytest.mark.full),
    ],
)
def test_blocks_of_256_numbers_are_read(tmp_path: Path, kinds: tuple[str, str]) -> None:
    """Types with blocks of 256 numbers can be read. Most published files have such types."""
    folder = save_tiny("wan", tmp_path / "wan", width=32, boundary_ratio=0.875)
    high = save_gguf(folder, tmp_path / "high.gguf", kinds[0])
    low = save_gguf(folder, tmp_path / "low.gguf", kinds[1], part="transformer_2")
    model = model_with(folder, high, low)
    rank_for = ranks(find_checkpoint(model), sampling_of(folder), model=model)
    expected = run_diffusers_with_gguf(folder, {"transformer": high, "transformer_2": low})
    check_every_cut(rank_for, STEPS, expected, REQUEST, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "hunyuan-video",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("ltx2", "wan-vace", "wan-animate", "skyreels-v2", "mochi")
        ),
    ],
)
def test_every_family_that_takes_files_has_the_bits_of_diffusers(
    tiny_models: TinyModels, tmp_path: Path, name: str
) -> None:
    """Every family that takes GGUF files gives the bits of diffusers.

    The files are of type BF16, which is possible for layers of any width, and is dequantised like
    other types.
    """
    tiny = tiny_models(name)
    folder = tiny.checkpoint.folder
    file = save_gguf(folder, tmp_path / "x.gguf", "BF16", is_original=False)
    model = model_with(folder, file, family=tiny.checkpoint.family)
    rank_for = ranks(find_checkpoint(model), tiny.sampling, model=model)
    assert _linear(loaded(rank_for(0, 1))["transformer"])
    expected = run_diffusers_with_gguf(folder, {"transformer": file}, tiny=tiny)
    check_every_cut(rank_for, tiny.steps, expected, tiny.request(), tiny.source)


@pytest.mark.slow
def test_a_lora_is_added_to_a_quantised_denoiser(ltx: Path, tmp_path: Path) -> None:
    file = save_gguf(ltx, tmp_path / "ltx.gguf")
    loras = (Lora(name=str(save_tiny_lora(ltx, tmp_path / "x.safetensors", seed=1)), weight=0.5),)
    model, sampling = model_with(ltx, file, loras=loras), sampling_of(ltx)
    expected = whole_clip(model, sampling, REQUEST, None)
    check_every_cut(
        ranks(find_checkpoint(model), sampling, model=model), STEPS, expected, REQUEST, None
    )
    plain = whole_clip(model_with(ltx, file), sampling, REQUEST, None)
    assert not torch.equal(plain[0][-1], expected[0][-1])


def test_the_weights_in_its_place_are_not_needed(ltx: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ltx, tmp_path / "folder"))
    file, other = (save_gguf(ltx, tmp_path / f"{kind}.gguf", kind) for kind in ("Q8_0", "Q4_0"))
    (weights,) = (folder / "transformer").glob("*.safetensors")
    weights.unlink()
    with pytest.raises(ModelError, match=r"transformer/.* is missing"):
        find_checkpoint(ModelConfig(name=str(folder)))
    checkpoint, another = (find_checkpoint(model_with(folder, each)) for each in (file, other))
    keys = {
        Capabilities.of("ltx", each, sampling=LtxSampling(), sizes=()).model_key
        for each in (checkpoint, another, find_checkpoint(ModelConfig(name=str(ltx))))
    }
    assert len(keys) == 3
    hashes = checkpoint.file_hashes()
    assert hashes["transformer/Q8_0.gguf"] == checkpoint.denoisers[0].denoiser.sha256
    ranks(checkpoint, sampling_of(ltx), model=model_with(folder, file))(0, 1)


@pytest.mark.slow
def test_its_memory_is_that_of_its_bytes_and_of_one_dequantised_layer(
    wan: Path, tmp_path: Path
) -> None:
    high = save_gguf(wan, tmp_path / "high.gguf", "Q4_0")
    low = save_gguf(wan, tmp_path / "low.gguf", "Q8_0", part="transformer_2")
    sampling = sampling_of(wan)
    estimates = []
    for files in ((), (high, low)):
        model = model_with(wan, *files)
        checkpoint = find_checkpoint(model, weights=False)
        estimates.append(memory.estimate(checkpoint, model, sampling, device="cpu").denoise)
    plain, quantised = estimates
    model = model_with(wan, high, low)
    rank = ranks(find_checkpoint(model), sampling, model=model)(STEPS - 1, STEPS)
    (module,) = loaded(rank).values()
    held = chain(module.parameters(), module.buffers())
    assert quantised.weight_bytes == sum(each.nbytes for each in held)
    assert quantised.weight_bytes < plain.weight_bytes / 3
    largest = max(math.prod(each.weight.quant_shape) for each in _linear(module))
    # A layer is dequantised to float16, and then converted to float32, so both count.
    assert quantised.activation_bytes > plain.activation_bytes
    assert quantised.activation_bytes >= (2 + 4) * largest
    bad = model_with(wan, save_gguf(wan, tmp_path / "bad" / "high.gguf", change=without(Q_LAYER)))
    with pytest.raises(ModelError, match="the file lacks"):
        memory.estimate(checkpoint, bad, sampling, device="cpu")


def _linear(module: Any) -> list[Any]:
    return [each for each in module.modules() if isinstance(each, GGUFLinear)]


# --- refusals ------------------------------------------------------------------------------------

Q_LAYER, BIAS = "blocks.0.self_attn.q.weight", "blocks.0.self_attn.q.bias"


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.pop(name) and None


def with_tensor(name: str, array: Any, kind: str = "F32") -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: (array, kind)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(Q_LAYER), "the file lacks 'blocks.0.attn1.to_q.weight'"),
        (
            with_tensor("blocks.9.self_attn.q.weight", np.ones((96, 96), "f")),
            "a WanTransformer3DModel has no 'blocks.9",
        ),
        (
            with_tensor(Q_LAYER, np.ones((96, 64), "f"), "Q8_0"),
            r"\[96, 64\], but the checkpoint's config says \[96, 96\]",
        ),
        (with_tensor(BIAS, np.ones(64, "f")), r"attn1.to_q.bias' has the shape \[64\], but"),
        (with_tensor(BIAS, np.ones(96, "f"), "Q8_0"), "of the type Q8_0, which diffusers reads in"),
    ],
)
def test_tensors_that_are_not_those_of_the_denoiser_are_named_before_the_load(
    wan: Path, tmp_path: Path, change: Any, words: str
) -> None:
    """A file whose tensors do not fit the denoiser is refused before the load.

    diffusers would leave missing tensors without data, and only warn of unknown ones.
    """
    model = model_with(wan, save_gguf(wan, tmp_path / "high.gguf", change=change))
    with pytest.raises(ModelError, match=words) as caught:
        ranks(find_checkpoint(model), sampling_of(wan), model=model)(0, 1)
    assert "high.gguf" in caught.value.message
    assert caught.value.details


def test_a_file_of_another_family_is_refused(wan: Path, ltx: Path, tmp_path: Path) -> None:
    model = model_with(wan, save_gguf(ltx, tmp_path / "high.gguf"))
    with pytest.raises(ModelError, match=r"the file lacks .* such tensors\)") as caught:
        ranks(find_checkpoint(model), sampling_of(wan), model=model)(0, 1)
    assert caught.value.hint == "use a file of the checkpoint's own model, a WanTransformer3DModel"


def test_what_is_no_such_file_is_refused(ltx: Path, tmp_path: Path) -> None:
    content = save_gguf(ltx, tmp_path / "good.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[:-8])
    (tmp_path / "other.gguf").write_bytes(b"{}")
    (tmp_path / "good.bin").write_bytes(content)
    for name, words in (
        ("none.gguf", "the file does not exist"),
        ("good.bin", "only gguf files are read"),
        ("cut.gguf", "the file is truncated: it ends within the tensor"),
        ("other.gguf", "the file is not a GGUF file"),
        (".", "the path is not a regular file|only gguf files"),
    ):
        with pytest.raises(ModelError, match=words) as caught:
            find_checkpoint(model_with(ltx, tmp_path / name))
        assert "`denoisers`" in caught.value.message
    good = Denoiser(name=str(tmp_path / "good.gguf"), sha256="0" * 64)
    with pytest.raises(ModelError, match=r"the denoiser .* has changed since the clip"):
        find_denoisers(ModelConfig(name=str(ltx), denoisers=(good,)))


def test_every_truncated_header_and_every_huge_count_is_refused(tmp_path: Path) -> None:
    """Truncated headers and huge counts are refused quickly.

    The package gguf would read a count of 2^63 elements one by one.
    """
    file = tmp_path / "x.gguf"
    write_gguf(file, {"a": (np.ones((2, 32), "f"), "Q8_0"), "b": (np.ones(3, "f"), "F32")})
    content = file.read_bytes()
    assert {
        name: (each.type.name, each.shape) for name, each in read_gguf_header(file).items()
    } == {
        "a": ("Q8_0", (2, 32)),
        "b": ("F32", (3,)),
    }
    end = content.index(b"\1\0\0\0\0\0\0\0b") + 33
    for length in range(end):
        file.write_bytes(content[:length])
        with pytest.raises(ModelError):
            read_gguf_header(file)
    for start in range(4, end):
        file.write_bytes(content[:start] + b"\xff" * 8 + content[start + 8 :])
        with suppress(ModelError):  # the header is still valid if the bytes are in a name
            assert read_gguf_header(file).keys() >= {"b"}


def _header(name: bytes, kind: int, *dims: int) -> bytes:
    entry = struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry + struct.pack("<IQ", kind, 0)


def test_types_and_shapes_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    for content, words in (
        (_header(b"w", 16, 256), "'w' is of the type IQ2_XXS, which diffusers does not read"),
        (_header(b"w", 999, 1), "'w' is of the type number 999"),
        (_header(b"w", 8, 31), r"'w' has the shape \[31\], which Q8_0 cannot have"),
        (_header(b"w", 0, 0), r"'w' has the shape \[0\]"),
        (_header(b"w", 0, 2**62, 2**62), "the file is truncated"),
        (_header(b"\xff", 0, 1), "the name of a tensor is not UTF-8"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian files of version 2 and 3"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "the file has no tensors"),
    ):
        file.write_bytes(content)
        with pytest.raises(ModelError, match=words):
            read_gguf_header(file)


def test_the_types_are_those_that_diffusers_reads() -> None:
    kinds = {gguf.GGMLQuantizationType(number): each for number, each in TENSOR_TYPES.items()}
    for kind, each in kinds.items():
        assert (kind.name, (each.numbers, each.size)) == (each.name, gguf.GGML_QUANT_SIZES[kind])
    plain = {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16}
    assert kinds.keys() == {*SUPPORTED_GGUF_QUANT_TYPES, *plain}
    others = {kind: kind.name for kind in gguf.GGMLQuantizationType if kind not in kinds}
    assert OTHER_TYPES.items() <= others.items()  # a later version of gguf may have more types


def test_the_rows_say_which_denoisers_diffusers_loads() -> None:
    for spec in FAMILY_SPECS.values():
        if spec.modular is not None:  # not tested with modular pipelines
            assert not spec.gguf
            continue
        cls = getattr(diffusers, spec.denoiser)
        assert (_get_single_file_loadable_mapping_class(cls) is not None) == spec.gguf, spec.name


def test_denoisers_that_a_model_cannot_load_are_refused(
    tiny_models: TinyModels, wan: Path, ltx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GGUF files for a model that cannot use them are refused, before a search for the files."""
    for model, names, words in (
        ("demo", ["x"], "diffusers loads no UNetSpatioTemporalConditionModel from a GGUF file"),
        (tiny_models("latte").checkpoint.folder, ["x"], "diffusers loads no LatteTransformer3DM"),
        (tiny_models("wan-modular").checkpoint.folder, ["x"], "no GGUF files into modular pipel"),
        (ltx, ["low"], "has one denoiser, but `denoisers` '"),
        (wan, ["x"], "has two experts, but `denoisers` '"),
        (wan, ["a/low", "b/low"], "`denoisers` names two files for one denoiser"),
    ):
        with pytest.raises(RequestError, match=words):
            find_checkpoint(model_with(model, *map(Path, names)))  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setenv("DIFFUSERS_GGUF_CUDA_KERNELS", "true")
        with pytest.raises(RequestError, match="diffusers would run a kernel that it downloads"):
            find_checkpoint(model_with(ltx, Path("x")))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RequestError, match="`denoisers` needs the package gguf") as caught:
        find_checkpoint(model_with(ltx, Path("x")))
    assert caught.value.hint == "pip install 'svdpp[gguf]'"
