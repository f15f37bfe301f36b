"""Ranks with LoRAs give the bits of diffusers' `__call__` with the same LoRAs."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from svdpp.config import Lora, ModelConfig, OutputConfig, PipelineConfig
from svdpp.config.families.registry import FAMILY_SPECS
from svdpp.driver.clip_metadata import clip_metadata
from svdpp.errors import ModelError, RequestError
from svdpp.media.inputs import ClipInput
from svdpp.models.base import LATENTS
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine.loras import check_loras_fit
from svdpp.models.lora_files import CLIP_LORAS_KEPT, lora_bytes
from svdpp.verification.clip_tasks import lora_from_metadata
from svdpp.verification.reference import Reference
from tests.models.test_registry import TinyModels
from tests.support.builders import save_tiny_lora
from tests.support.range_checks import (
    assert_equal,
    check_every_cut,
    nothing,
    ranks,
    read_folder,
    reference_clip,
    whole_clip,
)

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("wan", "ltx", "hunyuan-video", "cogvideox", "ltx2", "skyreels-v2", "mochi", "sana-video")


def loras_of(family: str, checkpoint: Path, folder: Path) -> tuple[Lora, ...]:
    """Save and return two LoRAs for a tiny checkpoint, one for each expert if there are two."""
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
        NAMES[0],
        *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:4]),
        *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.full]) for name in NAMES[4:]),
    ],
)
def test_every_cut_gives_the_bits_of_diffusers_with_the_same_loras(
    tiny_models: TinyModels, tmp_path: Path, name: str
) -> None:
    tiny_model = tiny_models(name)
    folder, sampling, request = (
        tiny_model.checkpoint.folder,
        tiny_model.sampling,
        tiny_model.request(),
    )
    model = ModelConfig(
        name=str(folder), loras=loras_of(tiny_model.checkpoint.family, folder, tmp_path)
    )
    plain, with_loras = (
        _run_diffusers_with_loras(folder, sampling, request, use) for use in ((), model.loras)
    )
    assert not np.array_equal(plain[1], with_loras[1])
    rank_for = ranks(find_checkpoint(model), sampling, model=model)
    check_every_cut(rank_for, tiny_model.steps, with_loras, request, None)
    whole = whole_clip(model, sampling, request, None)
    assert np.array_equal(whole[1], with_loras[1])
    assert not hasattr(
        rank_for(tiny_model.steps, tiny_model.steps)._pipe.transformer, "peft_config"
    )


def _run_diffusers_with_loras(
    folder: Path, sampling: Any, request: Any, loras: tuple[Lora, ...]
) -> Any:
    """Make a clip with diffusers, which loads the LoRAs as its manual says.

    Return what `reference_clip` returns.
    """
    model = ModelConfig(name=str(folder))
    reference = Reference(read_folder(folder), model, "cpu", from_image=False)
    pipe, names = reference.pipe, [f"adapter{index}" for index in range(len(loras))]
    for lora, name in zip(loras, names, strict=True):
        options = {"load_into_transformer_2": True} if lora.expert == "low" else {}
        pipe.load_lora_weights(lora.name, adapter_name=name, **options)
    if loras:
        pipe.set_adapters(names, [lora.weight for lora in loras])
    return reference_clip(reference, sampling, request)


#: Sets of LoRAs for clips that the same ranks make one after the other, as indices: A, B, none,
#: both in the other order, three others, for which A is unloaded, and A again.
SETS = ((0,), (1,), (), (1, 0), (2, 3, 4), (0,))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "has_model_lora"), [("wan", False), ("ltx", True)])
def test_clips_with_loras_of_their_own_have_the_bits_of_a_fresh_pipeline(
    tiny_models: TinyModels, tmp_path: Path, name: str, has_model_lora: bool
) -> None:
    """Clips with different LoRAs on the same ranks have the bits of fresh pipelines.

    Both experts switch their LoRAs, and a LoRA of the model itself stays active.
    """
    tiny_model = tiny_models(name)
    folder, sampling, request = (
        tiny_model.checkpoint.folder,
        tiny_model.sampling,
        tiny_model.request(),
    )
    own = loras_of(tiny_model.checkpoint.family, folder, tmp_path)
    of_clips = []
    for number in range(5):
        for_experts = own if len({lora.part for lora in own}) == 2 else own[:1]
        loras = []
        for lora in for_experts:
            file = tmp_path / f"{number}-{lora.part}.safetensors"
            save_tiny_lora(folder, file, part=lora.part, seed=10 + number)
            loras.append(replace(lora, name=str(file), weight=0.5 + number))
        of_clips.append(loras)
    model = ModelConfig(name=str(folder), loras=own[:1] if has_model_lora else ())
    rank_for = ranks(find_checkpoint(model), sampling, model=model)
    packet = rank_for(0, 0).encode({}, request)
    made = []
    for numbers in SETS:
        loras = tuple(lora for number in numbers for lora in of_clips[number])
        latents, *_ = _run_diffusers_with_loras(folder, sampling, request, (*model.loras, *loras))
        tensors = packet
        for step in range(tiny_model.steps):
            rank = rank_for(step, step + 1)
            rank.use_loras(loras)
            tensors = rank.denoise(tensors, step, step + 1, nothing)
            assert torch.equal(tensors[LATENTS], latents[step]), (numbers, step)
        made.append(tensors[LATENTS].numpy().tobytes())
    assert made[0] == made[-1]
    assert len(set(made)) == len(SETS) - 1
    adapters = rank_for(0, 1)._pipe.transformer.peft_config
    assert len(adapters) == CLIP_LORAS_KEPT + has_model_lora


def test_the_rows_say_which_pipelines_load_loras() -> None:
    for spec in FAMILY_SPECS.values():
        if spec.modular is not None:  # not tested with modular pipelines
            assert not spec.loras
            continue
        for name in filter(None, (spec.text_pipeline, spec.image_pipeline)):
            assert hasattr(getattr(diffusers, name), "load_lora_weights") == spec.loras, name


def _find(folder: Path | str, *loras: Lora) -> Any:
    return find_checkpoint(ModelConfig(name=str(folder), loras=loras))


def test_what_cannot_be_a_lora_is_refused_by_name(tiny_models: TinyModels, tmp_path: Path) -> None:
    folder = tiny_models("wan").checkpoint.folder
    file = save_tiny_lora(folder, tmp_path / "fast.safetensors", seed=1)
    (tmp_path / "fast.bin").write_bytes(file.read_bytes())
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:-8])
    for name, message in (
        ("loras/none.safetensors", "the file does not exist"),
        ("fast.bin", "only safetensors files are read"),
        ("cut.safetensors", "damaged or truncated"),
    ):
        with pytest.raises(ModelError, match=message) as caught:
            _find(folder, Lora(name=str(tmp_path / name), expert="low"))
        assert Path(name).name in str(caught.value)


def test_loras_that_a_model_cannot_load_are_refused(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, one = (tiny_models(name).checkpoint.folder for name in ("wan", "ltx"))
    for model, expert, message in (
        ("demo", None, "takes no `loras`"),
        (tiny_models("latte").checkpoint.folder, None, "takes no `loras`: diffusers' pipeline"),
        (tiny_models("wan-modular").checkpoint.folder, None, "no LoRAs into modular pipelines"),
        (one, "low", "has one denoiser, but `loras` 'x' names an expert"),
        (two, None, "two experts, but `loras` 'x' names no expert"),
    ):
        with pytest.raises(RequestError, match=message):
            _find(model, Lora(name="x", expert=expert))  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RequestError, match="`loras` needs the package peft"):
        _find(two, Lora(name="x", expert="low"))


def _save_changed_lora(folder: Path, tmp_path: Path, name: str, changes: dict[str, Any]) -> Lora:
    """Save and return a LoRA for the first expert, with changed tensors. None removes a tensor."""
    file = save_tiny_lora(folder, tmp_path / name, seed=1)
    tensors = {**load_file(file), **changes}
    save_file({key: each for key, each in tensors.items() if each is not None}, file)
    return Lora(name=str(file), expert="high")


FIRST_FACTOR = "transformer.blocks.0.attn1.to_q.lora_A.weight"
SECOND_FACTOR = "transformer.blocks.0.attn1.to_q.lora_B.weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({SECOND_FACTOR: None}, f"the tensor '{SECOND_FACTOR}' is missing: it belongs to"),
        ({FIRST_FACTOR: None}, f"the tensor '{FIRST_FACTOR}' is missing: it belongs to"),
        ({"transformer.blocks.0.attn1.to_q.dora_scale": torch.ones(24)}, "dora_scale"),
        ({SECOND_FACTOR: torch.ones(24, 3)}, r"do not fit together: \[2, 24\] and \[24, 3\]"),
    ],
)
def test_a_file_of_which_diffusers_would_drop_or_invent_something_is_refused(
    tiny_models: TinyModels, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """A LoRA file is refused before a rank starts if diffusers would ignore or invent a tensor.

    diffusers leaves a missing factor uninitialised.
    """
    folder = tiny_models("wan").checkpoint.folder
    with pytest.raises(ModelError, match=words) as caught:
        _find(folder, _save_changed_lora(folder, tmp_path, "x.safetensors", changes))
    assert caught.value.details


def test_a_file_that_asks_for_dropout_is_refused(tiny_models: TinyModels, tmp_path: Path) -> None:
    """A LoRA file with dropout is refused. diffusers would apply the dropout in each step."""
    folder = tiny_models("wan").checkpoint.folder
    file = save_tiny_lora(folder, tmp_path / "x.safetensors", seed=1)
    tensors, lora = load_file(file), Lora(name=str(file), expert="high")
    for config, words in (
        ('{"transformer.r": 2, "transformer.lora_dropout": 0.1}', "'transformer.lora_dropout' to"),
        ("[]", "the metadata lora_adapter_metadata is not a JSON object"),
        ("{", "the metadata lora_adapter_metadata is not JSON"),
    ):
        save_file(tensors, file, metadata={"lora_adapter_metadata": config})
        with pytest.raises(ModelError, match=words):
            _find(folder, lora)
    save_file(tensors, file, metadata={"lora_adapter_metadata": '{"transformer.lora_dropout": 0}'})
    assert _find(folder, lora).loras


def test_weights_that_are_close_are_told_apart(tiny_models: TinyModels, tmp_path: Path) -> None:
    folder = tiny_models("wan").checkpoint.folder
    file = str(save_tiny_lora(folder, tmp_path / "x.safetensors", seed=1))
    identities = {
        _find(folder, Lora(name=file, weight=weight, expert="high")).loras[0].identity
        for weight in (0.8, 0.8000001, 1.0)
    }
    assert len(identities) == 3
    assert {each.split(":")[1] for each in identities} == {"0.8", "0.8000001", "1"}


def test_numbers_that_are_not_finite_are_refused(tiny_models: TinyModels, tmp_path: Path) -> None:
    tiny_model = tiny_models("wan")
    factor = torch.full((24, 2), float("nan"))
    lora = _save_changed_lora(
        tiny_model.checkpoint.folder, tmp_path, "x.safetensors", {SECOND_FACTOR: factor}
    )
    with pytest.raises(ModelError, match=r"to_q.lora_B.weight' has numbers that are not finite"):
        ranks(_find(tiny_model.checkpoint.folder, lora), tiny_model.sampling)(0, 1)


OTHER = "transformer.blocks.0.attn9.to_q"


def test_tensors_that_have_no_place_in_the_denoiser_are_refused(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    tiny_model = tiny_models("wan")
    factors = {
        f"{OTHER}.lora_A.weight": torch.ones(2, 24),
        f"{OTHER}.lora_B.weight": torch.ones(24, 2),
    }
    lora = _save_changed_lora(tiny_model.checkpoint.folder, tmp_path, "x.safetensors", factors)
    checkpoint = _find(tiny_model.checkpoint.folder, lora)
    words = r"'blocks.0.attn9.to_q.lora_A.weight' is not in a Wan"
    with pytest.raises(ModelError, match=words):
        ranks(checkpoint, tiny_model.sampling)(0, 1)
    with pytest.raises(ModelError, match=words):
        check_loras_fit(checkpoint.loras, checkpoint)


def test_tensors_for_parts_that_the_model_lacks_are_listed_as_ignored(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    """Tensors for components that the model lacks are listed as ignored.

    An example is a LoRA for Wan 2.1 image-to-video on Wan 2.2, which has no image encoder.
    """
    tiny_model = tiny_models("wan")
    parts = ("blocks.0.attn2.add_k_proj", "blocks.0.attn2.add_v_proj")
    factors = {
        f"transformer.{part}.lora_{factor}.weight": torch.ones(shape)
        for part in parts
        for factor, shape in (("A", (2, 24)), ("B", (24, 2)))
    }
    factors["text_encoder.layers.0.q_proj.lora_A.weight"] = torch.ones(2, 24)
    factors["lora_te1_layers_0_q_proj.lora_up.weight"] = torch.ones(24, 2)
    folder = tiny_model.checkpoint.folder
    more = _save_changed_lora(folder, tmp_path, "more.safetensors", factors)
    plain = _save_changed_lora(folder, tmp_path, "plain.safetensors", {})
    packets, files = [], []
    for lora in (more, plain):
        checkpoint = _find(folder, lora)
        files += checkpoint.loras
        rank_for = ranks(checkpoint, tiny_model.sampling)
        packet = rank_for(0, 0).encode({}, tiny_model.request())
        packets.append(rank_for(0, 1).denoise(packet, 0, 1, nothing))
    assert_equal(*packets)
    ignored = {"add_k_proj": 2, "add_v_proj": 2, "adapter of a text encoder": 2}
    assert [file.ignored for file in files] == [ignored, {}]
    begin, _, parts = files[0].remark.partition(", because the model takes no such tensors: ")
    assert begin == "'more.safetensors': 6 tensors are ignored"
    assert {*parts.split(", ")} == {f"{part} (2)" for part in ignored}
    assert files[1].remark == ""
    # The clip's JSON lists the ignored tensors, and `verify` can read such a JSON.
    config = PipelineConfig(
        world_size=1, model=tiny_model.model, sampling=tiny_model.sampling, num_threads=1
    )
    output = OutputConfig(path=str(tmp_path / "a.mp4"))
    metadata = clip_metadata(ClipInput(), 0, output, config, checkpoint, files[:1])
    recorded = json.loads(json.dumps(metadata["lora"]))
    assert [each["ignored"] for each in recorded] == [{}, ignored]
    read = [lora_from_metadata(each).sha256 for each in recorded]
    assert read == [file.lora.sha256 for file in reversed(files)]


def test_a_file_in_the_format_of_other_programs_is_loaded_whole(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    tiny_model = tiny_models("ltx")
    file = save_tiny_lora(tiny_model.checkpoint.folder, tmp_path / "x.safetensors", seed=1)
    tensors = load_file(file)
    renamed = {
        f"diffusion_model.{key.removeprefix('transformer.')}": each for key, each in tensors.items()
    }
    save_file(renamed, file)
    rank = ranks(_find(tiny_model.checkpoint.folder, Lora(name=str(file))), tiny_model.sampling)(
        0, 1
    )
    assert rank._pipe.get_list_adapters() == {"transformer": ["lora0"]}


def test_wan_in_the_format_of_its_authors_is_loaded_with_its_scale(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    tiny_model, names = tiny_models("wan"), {}
    for attention, own in (("self_attn", "attn1"), ("cross_attn", "attn2")):
        for name in "qkv":
            names[f"diffusion_model.blocks.0.{attention}.{name}"] = f"{own}.to_{name}"
    tensors = {f"{name}.alpha": torch.tensor(1.0) for name in names}
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    tensors |= {f"{name}.lora_down.weight": draw(2, 24) for name in names}
    tensors |= {f"{name}.lora_up.weight": draw(24, 2) for name in names}
    tensors["diffusion_model.blocks.0.norm3.diff"] = torch.zeros(24)
    save_file(tensors, tmp_path / "x.safetensors")
    lora = Lora(name=str(tmp_path / "x.safetensors"), expert="high")
    checkpoint = _find(tiny_model.checkpoint.folder, lora)
    assert checkpoint.loras[0].ignored == {"adapter of norms": 1}
    pipe = ranks(checkpoint, tiny_model.sampling)(0, 1)._pipe
    for name, own in names.items():
        layer = pipe.transformer.blocks[0].get_submodule(own)
        factors = [tensors[f"{name}.lora_{each}.weight"] for each in ("down", "up")]
        product = layer.lora_B["lora0"].weight @ layer.lora_A["lora0"].weight
        assert torch.allclose(product, factors[1] @ factors[0] / 2)


def test_weights_and_the_lora_of_another_model_are_refused(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    tiny_model, mochi = tiny_models("ltx"), tiny_models("mochi").checkpoint.folder
    other = save_tiny_lora(mochi, tmp_path / "mochi.safetensors", seed=1)
    for file in (other, next((tiny_model.checkpoint.folder / "transformer").glob("*.safetensors"))):
        checkpoint = _find(tiny_model.checkpoint.folder, Lora(name=str(file)))
        with pytest.raises(ModelError, match=rf"the LoRA .*{file.name}") as in_rank:
            ranks(checkpoint, tiny_model.sampling)(0, tiny_model.steps)
        with pytest.raises(ModelError) as before:
            check_loras_fit(checkpoint.loras, checkpoint)
        assert (before.value.message, before.value.details) == (
            in_rank.value.message,
            in_rank.value.details,
        )


def test_a_lora_that_fits_no_weight_is_refused_before_one_is_loaded(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    """A LoRA whose shapes do not fit is refused before a weight is loaded, with both shapes."""
    tiny_model = tiny_models("wan")
    factors = {FIRST_FACTOR: torch.ones(2, 7), SECOND_FACTOR: torch.ones(24, 2)}
    lora = _save_changed_lora(tiny_model.checkpoint.folder, tmp_path, "x.safetensors", factors)
    checkpoint = _find(tiny_model.checkpoint.folder, lora)
    words = rf"{FIRST_FACTOR}' of shape \[2, 7\] does not fit .*to_q of shape \[24, 24\]"
    with pytest.raises(ModelError, match=words):
        check_loras_fit(checkpoint.loras, checkpoint)


def test_memory_counts_as_many_loras_of_clips_as_a_rank_keeps(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    """Memory estimates count as many of the clips' LoRAs as a rank keeps, the largest ones.

    The estimates take the expert with more LoRAs, and add the LoRAs of the model itself.
    """
    folder = tiny_models("wan").checkpoint.folder
    sizes, files = [], []
    for number in range(CLIP_LORAS_KEPT + 2):
        file = save_tiny_lora(folder, tmp_path / f"{number}.safetensors", seed=number)
        save_file(load_file(file), file, metadata={"name": "x" * 1000 * number})
        files.append(Lora(name=str(file), expert="high"))
        sizes.append(file.stat().st_size)
    model = ModelConfig(
        name=str(folder),
        loras=(files[0], replace(files[0], expert="low")),
        clip_loras=(*files, *(replace(file, weight=0.5) for file in files)),
    )
    assert lora_bytes(model) == sizes[0] + sum(sizes[-CLIP_LORAS_KEPT:])
    assert lora_bytes(replace(model, clip_loras=())) == sizes[0]
