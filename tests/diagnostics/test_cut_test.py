"""The cut test of `doctor`, for every row: copies of published sizes are tiny, all cuts equal."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.diagnostics import doctor
from svdpp.diagnostics.doctor import cut_test
from svdpp.models.checkpoint import Checkpoint, find_checkpoint
from svdpp.models.engine.load import component_class
from svdpp.verification.verify import Place, VerificationResult, compare_tensors
from tests.models.test_rows import CASES, KINDS, Case, chosen
from tests.models.tiny_families import save_tiny

#: What published configs have besides the defaults of diffusers' classes.
_T5 = {"d_model": 4096, "num_heads": 64, "d_kv": 64, "d_ff": 10240, "num_layers": 24}
PUBLISHED: Mapping[str, dict[str, Any]] = {
    "T5EncoderModel": _T5,
    "UMT5EncoderModel": _T5,
    "LlamaModel": {
        **{"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "head_dim": 128},
    },
    "CLIPTextModel": {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12},
    "Qwen2_5_VLTextModel": {
        **{"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28},
        **{"num_key_value_heads": 4, "layer_types": ["full_attention"] * 28},
        "rope_parameters": {
            **{"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
            "rope_theta": 1e6,
        },
    },
    "Gemma3ForConditionalGeneration": {
        "text_config": {
            **{"hidden_size": 3840, "num_hidden_layers": 48, "num_attention_heads": 16},
            **{"num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 15360},
            "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 8,
        }
    },
    "AutoencoderKLLTX2Video": {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8},
    "AutoencoderKL": {
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
    },
    "WanAnimateTransformer3DModel": {
        **{"added_kv_proj_dim": 5120, "image_dim": 4},  # that of the tiny encoder of images
        "motion_encoder_channel_sizes": None,
    },
    "LatteTransformer3DModel": {
        **{"caption_channels": 4096, "cross_attention_dim": 1152, "attention_head_dim": 72},
        **{"num_layers": 28, "in_channels": 4, "out_channels": 8},
    },
}
WITH_PUBLISHED_SIZES = (
    *("ltx2", "ltx2-image", "hunyuan-video", "hunyuan-video-1.5", "cogvideox", "cogvideox-image"),
    *("skyreels-v2", "skyreels-v2-image", "skyreels-v2-df", "latte", "mochi"),
    "wan-animate",
)
IMAGE_CHANNELS = {"cogvideox-image": 32, "skyreels-v2-image": 36}


def _with_published_sizes(folder: Path, in_channels: int | None) -> None:
    """Replaces the configs of all components; the weights do not fit them any more."""
    index = json.loads((folder / "model_index.json").read_text())
    for part, entry in index.items():
        path = folder / part / "config.json"
        if not path.is_file():
            continue
        config, cls = json.loads(path.read_text()), component_class(part, entry[1])
        if cls.__module__.startswith("diffusers"):
            config |= _defaults(cls, config)
        if part == "transformer" and in_channels is not None:
            config["in_channels"] = in_channels
        published = dict(PUBLISHED.get(entry[1], {}))
        if "text_config" in published:
            published["text_config"] = config["text_config"] | published["text_config"]
        path.write_text(json.dumps(config | published))


def _defaults(cls: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that the class has by default; switches stay."""
    parameters = inspect.signature(cls.__init__).parameters
    found = {name: parameters[name].default for name in config if name in parameters}
    return {
        name: list(each) if isinstance(each, tuple) else each
        for name, each in found.items()
        if isinstance(each, int | tuple) and not isinstance(each, bool)
    }


def _saved(name: str, folder: Path) -> tuple[Case, Path]:
    case = CASES[name]
    return case, save_tiny(case.family, folder / "saved", image=case.image, **case.changes)


def _check(checkpoint: Checkpoint, sampling: Any, folder: Path) -> None:
    config = PipelineConfig(
        world_size=1, model=ModelConfig(name=checkpoint.name), sampling=sampling
    )
    folder.mkdir()
    result = cut_test(checkpoint, folder, config)
    assert sum(file.stat().st_size for file in folder.rglob("*.safetensors")) < 100e6
    assert result.bitwise, result.first_difference
    assert {check.step for check in result.checks} == {1, 2, 3, 4}
    assert result.checks[-1].what in ("frames", "audio")


@pytest.mark.long
@pytest.mark.parametrize("name", chosen(KINDS))
def test_the_copy_of_every_row_is_equal(tmp_path: Path, name: str) -> None:
    case, folder = _saved(name, tmp_path)
    checkpoint = find_checkpoint(ModelConfig(name=str(folder), family=case.family))
    _check(checkpoint, case.config(), tmp_path / "copy")


@pytest.mark.long
@pytest.mark.full
@pytest.mark.parametrize("name", WITH_PUBLISHED_SIZES)
def test_a_copy_of_published_sizes_is_tiny_and_equal(tmp_path: Path, name: str) -> None:
    case, folder = _saved(name, tmp_path)
    _with_published_sizes(folder, IMAGE_CHANNELS.get(name))
    checkpoint = find_checkpoint(ModelConfig(name=str(folder)), weights=False)
    _check(checkpoint, case.config(), tmp_path / "copy")


@pytest.mark.long
def test_svd_of_the_published_sizes(tmp_path: Path) -> None:
    checkpoint = find_checkpoint(ModelConfig(), weights=False)
    _check(checkpoint, SvdSampling(), tmp_path / "copy")


def test_a_difference_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.zeros(1, 1, 4, 2, 2), torch.ones(1, 1, 4, 2, 2)
    place = Place(clip=0, step=1, rank=0)
    result = VerificationResult((compare_tensors("latent", one, other, place),))
    monkeypatch.setattr(doctor, "cut_test", lambda *_: result)
    names = ("devices", "model", "cut test")
    monkeypatch.setattr(doctor, "_CHECKS", {name: doctor._CHECKS[name] for name in names})
    config = PipelineConfig(world_size=1, model=ModelConfig(name="demo"))
    *_, check = doctor.examine(doctor.Examination(config, tmp_path))
    assert (check.verdict, check.exit_code) == ("failed", 3)
    assert check.detail.startswith("other bits than diffusers' whole call: clip 0, the latent")
