"""Ranks with LoRAs give the bits of diffusers' whole call with the same LoRAs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest

from svdpp.config import Lora, ModelConfig
from svdpp.errors import ModelError, RequestError
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine.model import load_model
from svdpp.models.engine.rows import ROWS
from svdpp.plan.layout import Roles
from svdpp.verification.reference import Reference
from tests.models.builders import save_tiny_lora
from tests.models.range_checks import (
    check_every_cut,
    latents_and_frames,
    ranks,
    read_folder,
    run_reference,
)
from tests.models.test_rows import CASES, Rows
from tests.models.tiny_families import save_tiny, save_tiny_wan

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("wan", "ltx", "hunyuan-video", "cogvideox", "ltx2", "skyreels-v2", "mochi")
WHOLE = {"encode": True, "denoise": True, "decode": True}


def loras_of(family: str, checkpoint: Path, folder: Path) -> tuple[Lora, ...]:
    """Two for a denoiser, or one for each of two experts; different weights."""
    second = "transformer_2" if family == "wan" else "transformer"
    experts: Any = ("high", "low") if family == "wan" else (None, None)
    files = [
        save_tiny_lora(checkpoint, folder / f"{seed}.safetensors", part=part, seed=seed)
        for seed, part in enumerate(("transformer", second))
    ]
    return tuple(
        Lora(name=str(file), weight=weight, expert=expert)
        for file, weight, expert in zip(files, (0.75, -1.5), experts, strict=True)
    )


@pytest.mark.parametrize(
    "name", [*NAMES[:2], *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[2:])]
)
def test_every_cut_gives_the_bits_of_diffusers_with_the_same_loras(
    rows: Rows, tmp_path: Path, name: str
) -> None:
    row = rows(name)
    folder, sampling, request = row.checkpoint.folder, row.sampling, row.request()
    model = ModelConfig(name=str(folder), loras=loras_of(row.checkpoint.family, folder, tmp_path))
    plain, with_loras = (_diffusers(folder, sampling, request, use) for use in ((), model.loras))
    assert not np.array_equal(plain[1], with_loras[1])
    rank_for = ranks(find_checkpoint(model), sampling, model=model)
    check_every_cut(rank_for, row.steps, with_loras, request, None)
    whole = latents_and_frames(model, sampling, request, None)
    assert np.array_equal(whole[1], with_loras[1])
    assert not hasattr(rank_for(row.steps, row.steps)._pipe.transformer, "peft_config")


def _diffusers(folder: Path, sampling: Any, request: Any, loras: tuple[Lora, ...]) -> Any:
    """Latents and frames of the whole call; the LoRAs are loaded as diffusers' manual says."""
    model = ModelConfig(name=str(folder))
    reference = Reference(read_folder(folder), model, "cpu", from_image=False)
    pipe, names = reference.pipe, ["first", "second"][: len(loras)]
    for lora, name in zip(loras, names, strict=True):
        options = {"load_into_transformer_2": True} if lora.expert == "low" else {}
        pipe.load_lora_weights(lora.name, adapter_name=name, **options)
    if loras:
        pipe.set_adapters(names, [lora.weight for lora in loras])
    return run_reference(reference, sampling, request)[:2]


def test_the_rows_say_which_pipelines_load_loras() -> None:
    for row in ROWS.values():
        for name in filter(None, (row.text, row.image)):
            assert hasattr(getattr(diffusers, name), "load_lora_weights") == row.loras, name


@pytest.fixture
def wan(tmp_path: Path) -> Path:
    return save_tiny_wan(tmp_path / "wan")


def _find(folder: Path | str, *loras: Lora) -> Any:
    return find_checkpoint(ModelConfig(name=str(folder), loras=loras))


def test_what_cannot_be_a_lora_is_refused_by_name(wan: Path, tmp_path: Path) -> None:
    file = save_tiny_lora(wan, tmp_path / "fast.safetensors", seed=1)
    pickled = tmp_path / "fast.bin"
    pickled.write_bytes(file.read_bytes())
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(file.read_bytes()[:-8])
    other = Lora(name=str(file), sha256="0" * 64)
    for lora, message in (
        (Lora(name=str(tmp_path / "none.safetensors")), "there is no such file"),
        (Lora(name="loras/none.safetensors"), "there is no such file"),
        (Lora(name=str(pickled)), "only safetensors files are read"),
        (Lora(name=str(cut)), "damaged or truncated"),
        (other, "has changed since the clip was made"),
    ):
        with pytest.raises(ModelError, match=message) as caught:
            _find(wan, lora)
        assert Path(lora.name).name in str(caught.value)


def test_experts_are_named_if_there_are_two(wan: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="has one expert: say none in --lora 'x'"):
        _find(wan, Lora(name="x", expert="low"))
    two = save_tiny_wan(tmp_path / "two", boundary_ratio=0.875)
    with pytest.raises(RequestError, match="two experts: say which in --lora 'x'"):
        _find(two, Lora(name="x"))


def test_models_without_loras_and_a_missing_package_are_refused(
    wan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in ("demo", save_tiny("latte", tmp_path / "latte")):
        with pytest.raises(RequestError, match="takes no --lora"):
            _find(model, Lora(name="x"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RequestError, match="needs the package peft") as caught:
        _find(wan, Lora(name="x"))
    assert "svdpp[lora]" in caught.value.hint


def test_weights_and_the_lora_of_another_model_are_refused(wan: Path, tmp_path: Path) -> None:
    mochi = save_tiny("mochi", tmp_path / "mochi")
    other = save_tiny_lora(mochi, tmp_path / "mochi.safetensors", seed=1)
    sampling, model = CASES["wan"].config(), ModelConfig(name=str(wan))
    for file in (other, next((wan / "transformer").glob("*.safetensors"))):
        checkpoint = _find(wan, Lora(name=str(file)))
        with pytest.raises(ModelError, match=rf"the LoRA .*{file.name}"):
            load_model(checkpoint, model, sampling, "cpu", Roles(**WHOLE))
