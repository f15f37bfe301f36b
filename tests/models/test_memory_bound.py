"""The quick bound lies above the exact estimate, for the demo model and for SVD-XT's own sizes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import Dtype, ModelConfig, SamplingConfig, SvdSampling
from svdpp.models.checkpoint import Checkpoint, find_checkpoint
from svdpp.models.memory import estimate
from svdpp.models.memory_bound import activation_bound, weight_bytes

pytestmark = pytest.mark.long

#: The configs of stabilityai/stable-video-diffusion-img2vid-xt, as far as sizes go.
_XT: dict[str, dict[str, Any]] = {
    "unet": {
        "block_out_channels": [320, 640, 1280, 1280],
        "cross_attention_dim": 1024,
        "num_attention_heads": [5, 10, 20, 20],
        "layers_per_block": 2,
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 768,
        "sample_size": 96,
        "num_frames": 25,
        "down_block_types": [
            *["CrossAttnDownBlockSpatioTemporal"] * 3,
            "DownBlockSpatioTemporal",
        ],
        "up_block_types": ["UpBlockSpatioTemporal", *["CrossAttnUpBlockSpatioTemporal"] * 3],
    },
    "vae": {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2},
    "image_encoder": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "patch_size": 14,
        "projection_dim": 1024,
    },
}


@pytest.fixture(scope="module")
def xt(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    demo = find_checkpoint(ModelConfig(name="demo")).folder
    folder = Path(shutil.copytree(demo, tmp_path_factory.mktemp("xt") / "xt"))
    for part, sizes in _XT.items():
        path = folder / part / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **sizes}))
    return ModelConfig(name=str(folder))


def _peaks(
    checkpoint: Checkpoint | None, model: ModelConfig, sampling: SamplingConfig
) -> list[int]:
    parts = estimate(checkpoint, model, sampling, device="cpu")
    found = (parts.encode, parts.denoise, parts.decode)
    return [part.activation_bytes for part in found if part is not None]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("height", "width", "frames", "chunk"),
    [(128, 128, 14, 14), (64, 64, 2, 2), (256, 512, 25, 1), (8, 1024, 14, 14)],
)
def test_the_bound_lies_above_the_demos_estimate(
    height: int, width: int, frames: int, chunk: int, dtype: Dtype
) -> None:
    model = ModelConfig(name="demo", dtype=dtype)
    sampling = SvdSampling(height=height, width=width, num_frames=frames, decode_chunk_size=chunk)
    checkpoint = find_checkpoint(model)
    peak = max(_peaks(checkpoint, model, sampling))
    assert peak < activation_bound(checkpoint, model, sampling) < 5 * peak + 2**29


@pytest.mark.parametrize("chunk", [1, pytest.param(25, marks=pytest.mark.long)])
def test_the_bound_lies_above_the_estimate_for_svd_xt(xt: ModelConfig, chunk: int) -> None:
    sampling = SvdSampling(num_frames=25, decode_chunk_size=chunk)
    checkpoint = find_checkpoint(xt, weights=False)
    peak = max(_peaks(checkpoint, xt, sampling))
    assert peak < activation_bound(checkpoint, xt, sampling) < 3 * peak


@pytest.mark.parametrize("shape", [(1, 4, 14, 64, 64), (1, 1, 2, 8, 8), (2, 16, 8, 32, 32)])
def test_the_bound_lies_above_the_dummys_estimate(shape: tuple[int, ...]) -> None:
    model = ModelConfig(name="dummy", dummy_latent_shape=shape)
    (peak,) = _peaks(None, model, SvdSampling())
    assert peak < activation_bound(None, model, SvdSampling()) < 30 * peak


def test_ranks_share_the_weights_of_files_that_have_the_dtype() -> None:
    model = ModelConfig(name="demo")
    checkpoint = find_checkpoint(model)
    sampling = SvdSampling(height=64, width=64, num_frames=2, decode_chunk_size=2)
    parts = estimate(checkpoint, model, sampling, device="cpu")
    assert parts.encode is not None
    assert parts.decode is not None
    told = sum(part.weight_bytes for part in (parts.encode, parts.denoise, parts.decode))
    found = [weight_bytes(checkpoint, model, part) for part in checkpoint.weighted]
    assert sum(each.num_bytes for each in found) == pytest.approx(told, rel=0.1)
    assert not any(each.is_shared for each in found), "the demo's files are fp16"
    half = ModelConfig(name="demo", dtype="fp16")
    for each, part in zip(found, checkpoint.weighted, strict=True):
        assert weight_bytes(checkpoint, half, part) == (each.num_bytes // 2, True)
