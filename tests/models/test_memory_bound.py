"""The quick bound lies above the estimate, for the models that are built in."""

from __future__ import annotations

import pytest

from svdpp.config import Dtype, ModelConfig, SamplingConfig, SvdSampling
from svdpp.models.checkpoint import Checkpoint, find_checkpoint
from svdpp.models.free_memory import activation_bound, weight_bytes
from svdpp.models.memory import estimate

pytestmark = pytest.mark.long


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
