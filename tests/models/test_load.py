"""A rank loads the components it needs, with the same bits as diffusers' own pipeline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import StableVideoDiffusionPipeline, UNetSpatioTemporalConditionModel
from diffusers.models.attention import BasicTransformerBlock
from safetensors.torch import load_file, save_file

from svdpp.config import ModelConfig, SvdSampling
from svdpp.errors import ModelError, OutOfMemoryError, RequestError
from svdpp.models.checkpoint import Checkpoint, find_checkpoint
from svdpp.models.engine.load import load_pipeline
from svdpp.plan.layout import Roles
from tests.models.builders import edit_json, save_tiny_checkpoint

UNET = "unet/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
CLIP = "image_encoder/model.safetensors"
PROJECTION = "visual_projection.weight"


def parts_of(checkpoint: Checkpoint | Path, roles: str = "EXD", **options: Any) -> Any:
    """Loads the parts for roles given as letters: E encode, X denoise, D decode."""
    if isinstance(checkpoint, Path):
        checkpoint = find_checkpoint(ModelConfig(name=str(checkpoint)))
    device = options.pop("device", "cpu")
    model = ModelConfig(name=checkpoint.name, **options)
    held = Roles(encode="E" in roles, denoise="X" in roles, decode="D" in roles)
    pipe = load_pipeline(checkpoint, model, sampling=SvdSampling(), roles=held, device=device)
    return SimpleNamespace(
        **{
            part: None if getattr(each, "is_skeleton", False) else each
            for part, each in pipe.components.items()
        }
    )


# Loaded components.


def test_shards_and_variants_are_loaded(tiny: Path, tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, variant="fp16", max_shard_size="500KB")
    sharded = find_checkpoint(ModelConfig(name=str(tmp_path), variant="fp16"))
    parts, whole = parts_of(sharded), parts_of(tiny)
    for name in ("unet", "vae", "image_encoder"):
        ours, expected = (getattr(each, name).state_dict() for each in (parts, whole))
        assert expected
        assert ours.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in ours.items())


@pytest.mark.long
@pytest.mark.parametrize(
    ("roles", "present"),
    [
        ("E", {"image_encoder", "feature_extractor", "vae"}),
        ("X", {"unet"}),
        ("D", {"vae"}),
        ("XD", {"vae", "unet"}),
        ("ED", {"image_encoder", "feature_extractor", "vae"}),
        ("", set()),
    ],
)
def test_a_rank_loads_only_what_its_roles_need(tiny: Path, roles: str, present: set[str]) -> None:
    parts = parts_of(tiny, roles)
    names = {"image_encoder", "feature_extractor", "vae", "unet"}
    assert {name for name in names if getattr(parts, name) is not None} == present
    uses = Roles(encode="E" in roles, denoise="X" in roles, decode="D" in roles)
    checkpoint = find_checkpoint(ModelConfig(name=str(tiny)), weights=False)
    assert checkpoint.components_of(uses, SvdSampling()) == present - {"feature_extractor"}
    if parts.vae is not None:
        halves = {name for name, _ in parts.vae.named_children()}
        encode = {"encoder", "quant_conv"} if "E" in roles else set()
        assert halves == encode | ({"decoder"} if "D" in roles else set())


@pytest.mark.parametrize("name", ["CLIPImageProcessor", "CLIPImageProcessorPil"])
def test_the_image_processor_is_that_of_the_pipeline(folder: Path, name: str) -> None:
    edit_json(folder / "model_index.json", feature_extractor=["transformers", name])
    pipeline = StableVideoDiffusionPipeline.from_pretrained(folder)
    ours, theirs = parts_of(folder, "E").feature_extractor, pipeline.feature_extractor
    assert type(ours) is type(theirs)
    assert ours.to_dict() == theirs.to_dict()


def test_memory_opt_turns_on_chunking_in_the_unet(tiny: Path) -> None:
    for memory_opt, size in ((False, None), (True, 1)):
        unet = parts_of(tiny, "X", memory_opt=memory_opt).unet
        blocks = [each for each in unet.modules() if isinstance(each, BasicTransformerBlock)]
        assert {each._chunk_size for each in blocks} == {size}


@pytest.mark.long
def test_loading_prints_nothing() -> None:
    code = """
from svdpp.config import ModelConfig, SvdSampling
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine.model import load_model
from svdpp.plan.layout import Roles
model = ModelConfig(name="demo", dtype="fp16")
found = find_checkpoint(model)
load_model(found, model, SvdSampling(), "cpu", Roles(encode=True, denoise=True, decode=True))
import diffusers
diffusers.StableVideoDiffusionPipeline.from_pretrained(found.folder)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_scheduler_config_that_the_class_rejects(folder: Path) -> None:
    edit_json(folder / "scheduler/scheduler_config.json", beta_schedule="nonsense")
    with pytest.raises(ModelError, match="scheduler cannot be loaded: nonsense"):
        find_checkpoint(ModelConfig(name=str(folder))).new_scheduler(None)


# Weights that do not fit.


def change_weight(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    weights = {**load_file(path), name: tensor}
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("file", "name", "tensor", "phrase"),
    [
        (UNET, "conv_in.weight", None, "unet: weights are missing, .* is 'conv_in.weight' of 1"),
        (UNET, "extra", torch.zeros(1), "are unexpected, the first is 'extra'"),
        (UNET, "conv_in.bias", torch.zeros(9), "conv_in.bias expected shape"),
        (CLIP, PROJECTION, torch.zeros(3, 3), f"are mismatched, the first is .*{PROJECTION}"),
        (CLIP, PROJECTION, None, "weights are missing, the first"),
        (VAE, "quant_conv.bias", None, "weights are missing, the first is 'quant_conv.bias'"),
        (
            *(UNET, "conv_in.bias", torch.zeros(32, dtype=torch.int8)),
            "unet has weights of the dtype I8: quantised",
        ),
    ],
)
def test_weights_of_another_model(
    folder: Path, file: str, name: str, tensor: torch.Tensor | None, phrase: str
) -> None:
    change_weight(folder / file, name, tensor)
    with pytest.raises(ModelError, match=phrase) as caught:
        parts_of(folder)
    assert caught.value.exit_code == 5
    assert str(folder) in caught.value.message
    assert caught.value.message.isprintable()


def test_buffer_of_old_transformers_is_accepted(folder: Path) -> None:
    name = "vision_model.embeddings.position_ids"
    change_weight(folder / CLIP, name, torch.arange(17)[None])
    encoder = parts_of(folder, "E").image_encoder
    assert name in dict(encoder.named_buffers())


@pytest.mark.parametrize(
    ("config", "changes", "component"),
    [
        ("image_encoder/config.json", {"hidden_act": "no such thing"}, "image_encoder"),
        ("unet/config.json", {"down_block_types": ["Non\x1bsense", "Nonsense"]}, "unet"),
    ],
)
def test_config_that_the_library_rejects(
    folder: Path, config: str, changes: dict[str, Any], component: str
) -> None:
    edit_json(folder / config, **changes)
    with pytest.raises(ModelError, match=f"{component} cannot be loaded: ") as caught:
        parts_of(folder)
    assert caught.value.__cause__ is not None
    assert caught.value.message.isprintable()


# Machines that cannot load the model.


@pytest.mark.long
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB"),
        torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_too_little_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    unet_class = UNetSpatioTemporalConditionModel
    for name in ("from_pretrained", "to"):
        with monkeypatch.context() as patch:
            patch.setattr(unet_class, name, fail)
            with pytest.raises(
                OutOfMemoryError, match="unet needs more memory than cpu has free"
            ) as caught:
                parts_of(tiny, "X")
        assert caught.value.exit_code == 4
        assert "--dtype bf16 or fp16" in caught.value.hint
        assert caught.value.__cause__ is error


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_missing_device(tiny: Path) -> None:
    with pytest.raises(RequestError, match="cuda:7 cannot be used: "):
        parts_of(tiny, "X", device="cuda:7")
