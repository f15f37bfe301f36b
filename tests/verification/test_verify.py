"""The proof: a difference of one bit is found and measured, and each fault of a rank located."""

from __future__ import annotations

import socket
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling
from svdpp.media.inputs import example_photos
from svdpp.models.dummy import DummyModel
from svdpp.verification.verify import (
    Check,
    Place,
    VerificationResult,
    compare_tensors,
    run_pipelined,
    verify,
)
from svdpp.worker.tensor_files import TensorStore
from tests.faults.damage import Damage, one_ulp_off
from tests.models.builders import save_tiny_checkpoint


def _compare(ours: torch.Tensor, theirs: torch.Tensor, what: Any = "latent") -> Check:
    return compare_tensors(what, ours, theirs, Place(clip=2, step=8, rank=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_ulp_is_found_and_placed(dtype: torch.dtype) -> None:
    latent = torch.randn(1, 2, 4, 3, 3).to(dtype)
    same = _compare(latent, latent.clone())
    assert (same.equal, same.max_abs_diff, same.max_ulp, same.first_index) == (True, 0.0, 0, None)
    check = _compare(one_ulp_off(latent), latent)
    # The fault is injected in the middle of 72 elements, at index 36.
    assert (check.equal, check.max_ulp, check.first_index) == (False, 1, (0, 1, 0, 0, 0))
    assert 0 < check.max_abs_diff < 0.1


def test_bits_are_compared_and_not_numbers() -> None:
    zero = _compare(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (zero.equal, zero.max_abs_diff, zero.max_ulp) == (False, 0.0, 0)
    nan = _compare(torch.tensor([torch.nan]), torch.tensor([1.0]))
    assert (nan.equal, nan.max_abs_diff) == (False, float("inf"))


@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_ulps_count_the_numbers_between(a: float, b: float) -> None:
    distance = _compare(torch.tensor([a]), torch.tensor([b])).max_ulp
    ordered = sorted((np.float32(a), np.float32(b)))
    if distance < 50:
        for _ in range(distance):
            ordered[0] = np.nextafter(ordered[0], np.float32(np.inf))
        assert ordered[0] == ordered[1]
    else:
        assert a != b


@pytest.mark.parametrize(
    ("what", "dtype", "most"), [("frames", torch.uint8, 255), ("audio", torch.int16, 32767)]
)
def test_levels_are_compared(what: Any, dtype: torch.dtype, most: int) -> None:
    levels = torch.zeros((2, 4, 4, 3), dtype=dtype)
    other = levels.clone()
    other[1, 2, 3, 0] = 5
    assert _compare(levels, levels.clone(), what).equal
    for ours, theirs in ((other, levels), (levels, other)):
        check = _compare(ours, theirs, what)
        assert (check.equal, check.max_ulp, check.first_index) == (False, 5, (1, 2, 3, 0))
        assert check.distance == f"5 of {most} levels"
        assert (check.max_abs_diff, check.psnr_db) == (5 / most, None)


def test_verdict_names_the_first_difference() -> None:
    latent = torch.ones(3)
    good, bad = _compare(latent, latent), _compare(latent, latent + 1)
    verdict = VerificationResult((good, bad, bad))
    assert verdict.first_difference is bad
    report = verdict.to_json()
    assert (report["schema_version"], report["equal"], report["max_abs_diff"]) == (1, False, 1.0)
    assert report["checks"][0].keys() >= {"clip", "what", "step", "rank", "equal", "sha256"}


def test_another_host_names_no_file_outside_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not the name"):
        TensorStore(tmp_path).put("../clip3_step7", b"")


# --- by real processes ----------------------------------------------------------------------------


REQUESTS = [
    ClipRequest(seed=seed, image=str(photo)) for seed, photo in enumerate(example_photos()[:3])
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PipelineConfig:
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", vae_factor=4)
    return PipelineConfig(
        world_size=2,
        model=ModelConfig(name=str(folder)),
        sampling=SvdSampling(num_inference_steps=4, height=64, width=64, num_frames=3),
    )


@pytest.mark.processes
@pytest.mark.parametrize(("world_size", "dtype"), [(2, "fp32"), (4, "bf16")])
def test_svd_through_ranks_is_bitwise_diffusers(
    tiny: PipelineConfig, world_size: int, dtype: str
) -> None:
    model = replace(tiny.model, dtype=dtype)  # type: ignore[arg-type]
    verdict = verify(replace(tiny, world_size=world_size, model=model), REQUESTS)
    assert verdict.bitwise
    steps = [(rank + 1) * 4 // world_size for rank in range(world_size)]
    latents = [("latent", step, rank) for rank, step in enumerate(steps[:-1])]
    last = [("final_latent", 4, world_size - 1), ("frames", 4, world_size - 1)]
    found = [(check.clip, check.what, check.step, check.rank) for check in verdict.checks]
    assert found == [(clip, *place) for clip in range(3) for place in (*latents, *last)]
    hashes = [check.sha256 for check in verdict.checks]
    assert len(set(hashes)) == len(hashes), "clips and steps must not be the same thing twice"


@pytest.mark.processes
def test_a_launched_rank_0_frees_its_memory_before_the_reference_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its process goes on, and would keep its model and the allocator's cache on the device."""
    dummy = ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8))
    models: list[weakref.ref[DummyModel]] = []
    emptied: list[bool] = []

    def load_model(*_: Any) -> DummyModel:
        model = DummyModel(dummy.dummy_latent, 6, torch.device("cpu"))
        models.append(weakref.ref(model))
        return model

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (launcher | {"MASTER_PORT": port}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("svdpp.worker.device.apply_settings", lambda **_: None)  # of this process
    monkeypatch.setattr("svdpp.worker.rank.load_model", load_model)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(models[0]() is None))
    config = PipelineConfig(world_size=1, model=dummy, sampling=SvdSampling(num_inference_steps=6))
    run_pipelined(config, [ClipRequest(seed=0)], tmp_path)
    assert emptied == [True]


@pytest.mark.processes
def test_a_planted_fault_is_caught_where_it_was_planted(tiny: PipelineConfig) -> None:
    """All of this clip after the fault differs, and nothing else."""
    verdict = verify(tiny, REQUESTS, fault=Damage("skip", 0, 1))
    first = verdict.first_difference
    assert first is not None
    assert (first.what, first.clip, first.step, first.rank) == ("latent", 1, 2, 0)
    assert [check.equal for check in verdict.checks] == [*[True] * 3, *[False] * 3, *[True] * 3]
