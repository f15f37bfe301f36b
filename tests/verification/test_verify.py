"""Verification: differences of one bit are found and measured, and faults of ranks are located."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from svdpp.config import (
    ClipRequest,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
    SvdSampling,
)
from svdpp.config.families.wan import WanSampling
from svdpp.config.tolerance import Tolerance
from svdpp.errors import RequestError
from svdpp.media.inputs import example_images
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.dummy import DummyModel
from svdpp.verification.result import (
    Check,
    CheckLocation,
    VerificationResult,
    compare_tensors,
)
from svdpp.verification.verify import run_pipelined, verify
from svdpp.worker.tensor_files import TensorStore
from tests.support.builders import save_tiny_checkpoint
from tests.support.damage import Damage, one_ulp_off
from tests.support.ports import free_port
from tests.support.tiny_families import save_tiny_wan


def _compare(
    ours: torch.Tensor, theirs: torch.Tensor, what: Any = "latent", **tolerance: float
) -> Check:
    location = CheckLocation(clip=2, step=8, rank=1)
    return compare_tensors(what, ours, theirs, location, tolerance=Tolerance(**tolerance))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_ulp_is_found_and_placed(dtype: torch.dtype) -> None:
    latent = torch.randn(1, 2, 4, 3, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    same = _compare(latent, latent.clone())
    assert (same.equal, same.max_abs_diff, same.max_ulp, same.first_index) == (True, 0.0, 0, None)
    check = _compare(one_ulp_off(latent), latent)
    # The fault is in the middle of 72 elements, at element 36, which has this index.
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


_NUMBERS = st.floats(width=16, allow_nan=True, allow_infinity=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(
    st.lists(st.tuples(_NUMBERS, _NUMBERS), min_size=1, max_size=4),
    st.floats(0, 100),
    st.floats(0, 2),
)
def test_a_tolerance_means_what_torch_means(
    dtype: torch.dtype, pairs: list[tuple[float, float]], atol: float, rtol: float
) -> None:
    ours, theirs = (torch.tensor(side).to(dtype) for side in zip(*pairs, strict=True))
    wide = [side.double() for side in (ours, theirs)]  # torch would round in `dtype`
    is_close = torch.isclose(*wide, atol=atol, rtol=rtol)
    integer = torch.int32 if dtype is torch.float32 else torch.int16
    same_bits = ours.view(integer) == theirs.view(integer)
    check = _compare(ours, theirs, atol=atol, rtol=rtol)
    assert check.bitwise == same_bits.all()
    if atol or rtol:
        assert check.equal == (is_close | same_bits).all()


def test_a_difference_above_the_tolerance_is_found_behind_one_below_it() -> None:
    expected = torch.ones(1, 2, 4, 3, 3)
    ours = expected.clone()
    ours[0, 0, 0, 0, 1], ours[0, 1, 2, 0, 0] = 1 + 1e-4, 1.5
    for atol, equal, first in (
        (0.0, False, (0, 0, 0, 0, 1)),
        (1e-3, False, (0, 1, 2, 0, 0)),
        (0.5, True, (0, 0, 0, 0, 1)),
    ):
        check = _compare(ours, expected, atol=atol)
        assert (check.equal, check.bitwise, check.first_index) == (equal, False, first)
        assert check.max_abs_diff == 0.5
    levels = torch.zeros((2, 4, 4, 3), dtype=torch.uint8)
    off = levels.clone()
    off[1, 0, 0, 0] = 3
    assert _compare(off, levels, "frames", atol=3 / 255).equal
    assert not _compare(off, levels, "frames", atol=2.9 / 255).equal


def test_the_three_verdicts_in_words_and_json() -> None:
    latent = torch.ones(3)
    same = VerificationResult((_compare(latent, latent),))
    tolerance = Tolerance(atol=2.0)
    near = VerificationResult(
        (_compare(latent, latent), _compare(latent + 1, latent, atol=2.0)), tolerance=tolerance
    )
    far = VerificationResult(
        (_compare(latent + 1, latent, atol=2.0), _compare(latent + 3, latent, atol=2.0)),
        tolerance=tolerance,
    )
    words = ("bitwise equal", "within tolerance", "different")
    for result, verdict, passes in zip((same, near, far), words, (True, True, False), strict=True):
        report = json.loads(json.dumps(result.to_json(), allow_nan=False))
        assert (report["verdict"], report["equal"], result.verdict) == (verdict, passes, verdict)
        assert str(result).startswith(verdict)
    assert near.to_json()["largest_difference"] == {
        **{"clip": 2, "what": "latent", "step": 8, "rank": 1},
        **{"max_abs_diff": 1.0, "max_ulp": 8388608},
    }
    assert "largest difference 1 (8388608 ULP" in str(near)
    assert "clip 2, the latent after step 7, computed by rank 1" in str(near)
    assert far.first_difference is far.checks[1]
    nan = VerificationResult((_compare(latent * torch.nan, latent, atol=1e30),))
    assert json.loads(json.dumps(nan.to_json(), allow_nan=False))["max_abs_diff"] is None
    assert not nan.equal


def test_a_difference_names_the_side_that_ran_short_of_memory() -> None:
    latent = torch.ones(3)
    check = _compare(latent + 1, latent)
    plain = VerificationResult((check,))
    short = VerificationResult((check,), short_of_memory=("reference",))
    assert "memory" not in str(plain)
    assert "GPU memory ran short in the reference: cuDNN" in str(short)
    assert short.to_json()["short_of_memory"] == ["reference"]
    assert short.failure_details()["short_of_memory"] == ["reference"]
    assert "memory" not in str(VerificationResult((_compare(latent, latent),), {}))


@pytest.mark.parametrize("wrong", [{"atol": -1.0}, {"rtol": float("nan")}, {"atol": float("inf")}])
def test_a_tolerance_that_allows_nothing_or_all_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestError, match="must be a finite number"):
        Tolerance(**wrong)


def test_another_host_names_no_file_outside_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a file name"):
        TensorStore(tmp_path).put("../clip3_step7", b"")


# --- verification with real ranks -----------------------------------------------------------------


REQUESTS = [
    ClipRequest(seed=seed, image=str(photo)) for seed, photo in enumerate(example_images()[:3])
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PipelineConfig:
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", vae_factor=4)
    return PipelineConfig(
        world_size=2,
        model=ModelConfig(name=str(folder)),
        sampling=SvdSampling(num_inference_steps=4, height=64, width=64, num_frames=3),
    )


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "ranks"), [("pipeline", {0, 1}), ("data-parallel", {0})])
def test_a_verification_takes_a_layout_by_name(layout: Any, ranks: set[int]) -> None:
    model = ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8))
    sampling = SvdSampling(num_inference_steps=4)
    config = PipelineConfig(world_size=2, model=model, sampling=sampling)

    verdict = verify(config, [ClipRequest(seed=seed) for seed in range(2)], layout=layout)

    assert verdict.bitwise
    assert {check.rank for check in verdict.checks if check.clip == 0} == ranks


@pytest.mark.slow
def test_the_steps_of_experts_are_found_for_a_configuration_from_python(tmp_path: Path) -> None:
    """`verify` finds the step at which the second expert takes over, which a Python caller cannot
    know.
    """
    folder = save_tiny_wan(tmp_path / "model", boundary_ratio=0.6)
    sampling = WanSampling(height=32, width=32, num_frames=5, num_inference_steps=4)
    parallel = ParallelConfig(split="balanced")
    model = ModelConfig(name=str(folder))
    config = PipelineConfig(world_size=2, model=model, sampling=sampling, parallel=parallel)
    boundary = find_checkpoint(model).expert_boundary(sampling)
    assert boundary == 3, "the experts do not divide the steps as models with one expert do"
    result = verify(config, [ClipRequest(seed=0, prompt="a cat")])
    assert result.bitwise
    assert result.checks[0].step == boundary


@pytest.mark.slow
def test_a_launched_rank_0_frees_its_memory_before_the_reference_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 0 of a launcher frees its memory before the reference starts.

    The process of rank 0 continues, and would keep the model and the allocator's cache on the
    device.
    """
    dummy = ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8))
    models: list[weakref.ref[DummyModel]] = []
    emptied: list[bool] = []

    def load_rank_model(*_: Any) -> DummyModel:
        model = DummyModel(dummy.dummy_latent, 6, torch.device("cpu"))
        models.append(weakref.ref(model))
        return model

    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (launcher | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    # The test must not change the settings of its own process.
    monkeypatch.setattr("svdpp.worker.device.apply_settings", lambda **_: None)
    monkeypatch.setattr("svdpp.worker.rank.load_rank_model", load_rank_model)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(models[0]() is None))
    config = PipelineConfig(world_size=1, model=dummy, sampling=SvdSampling(num_inference_steps=6))
    run_pipelined(config, [ClipRequest(seed=0)], tmp_path)
    assert emptied == [True]


@pytest.mark.slow
def test_a_planted_fault_is_caught_where_it_was_planted(tiny: PipelineConfig) -> None:
    """Verification reports the clip, step and rank of a planted fault.

    All tensors of the clip after the fault differ. All other tensors are equal.
    """
    verdict = verify(tiny, REQUESTS, fault=Damage("skip", 0, 1), atol=1e-6, rtol=1e-6)
    first = verdict.first_difference
    assert first is not None
    assert (first.what, first.clip, first.step, first.rank) == ("latent", 1, 2, 0)
    assert [check.equal for check in verdict.checks] == [*[True] * 3, *[False] * 3, *[True] * 3]
