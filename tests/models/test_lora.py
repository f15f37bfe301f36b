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
from svdpp.models.engine.rows import ROWS
from svdpp.verification.reference import Reference
from tests.models.builders import save_tiny_lora
from tests.models.range_checks import check_every_cut, ranks, read_folder, run_reference, whole_clip
from tests.models.test_rows import Rows

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("wan", "ltx", "hunyuan-video", "cogvideox", "ltx2", "skyreels-v2", "mochi")


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
    "name",
    [
        *NAMES[:2],
        *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[2:4]),
        *(pytest.param(name, marks=[pytest.mark.long, pytest.mark.full]) for name in NAMES[4:]),
    ],
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
    whole = whole_clip(model, sampling, request, None)
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
    return run_reference(reference, sampling, request)


def test_the_rows_say_which_pipelines_load_loras() -> None:
    for row in ROWS.values():
        for name in filter(None, (row.text, row.image)):
            assert hasattr(getattr(diffusers, name), "load_lora_weights") == row.loras, name


def _find(folder: Path | str, *loras: Lora) -> Any:
    return find_checkpoint(ModelConfig(name=str(folder), loras=loras))


def test_what_cannot_be_a_lora_is_refused_by_name(rows: Rows, tmp_path: Path) -> None:
    folder = rows("wan").checkpoint.folder
    file = save_tiny_lora(folder, tmp_path / "fast.safetensors", seed=1)
    (tmp_path / "fast.bin").write_bytes(file.read_bytes())
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:-8])
    for name, message in (
        ("loras/none.safetensors", "there is no such file"),
        ("fast.bin", "only safetensors files are read"),
        ("cut.safetensors", "damaged or truncated"),
    ):
        with pytest.raises(ModelError, match=message) as caught:
            _find(folder, Lora(name=str(tmp_path / name), expert="low"))
        assert Path(name).name in str(caught.value)


def test_loras_that_a_model_cannot_load_are_refused(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, one = (rows(name).checkpoint.folder for name in ("wan", "ltx"))
    for model, expert, message in (
        ("demo", None, "takes no --lora"),
        (rows("latte").checkpoint.folder, None, "takes no --lora"),
        (one, "low", "has one expert: say none in --lora 'x'"),
        (two, None, "two experts: say which in --lora 'x'"),
    ):
        with pytest.raises(RequestError, match=message):
            _find(model, Lora(name="x", expert=expert))  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RequestError, match="--lora needs the package peft"):
        _find(two, Lora(name="x", expert="low"))


def test_weights_and_the_lora_of_another_model_are_refused(rows: Rows, tmp_path: Path) -> None:
    row, mochi = rows("ltx"), rows("mochi").checkpoint.folder
    other = save_tiny_lora(mochi, tmp_path / "mochi.safetensors", seed=1)
    for file in (other, next((row.checkpoint.folder / "transformer").glob("*.safetensors"))):
        checkpoint = _find(row.checkpoint.folder, Lora(name=str(file)))
        with pytest.raises(ModelError, match=rf"the LoRA .*{file.name}"):
            ranks(checkpoint, row.sampling)(0, row.steps)
