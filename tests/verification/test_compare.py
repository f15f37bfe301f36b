"""The comparison: a difference of one bit is found, and its size is measured."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from svdpp.verification.verify import Check, Place, VerificationResult, compare_tensors
from svdpp.worker.tensor_files import TensorStore, tensor_sha256
from tests.faults.damage import one_ulp_off

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _compare(ours: torch.Tensor, theirs: torch.Tensor) -> Check:
    place = Place(clip=2, step=8, rank=1)
    return compare_tensors("latent", ours, theirs, place)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bits_are_equal(dtype: torch.dtype) -> None:
    latent = torch.randn(1, 2, 4, 3, 3).to(dtype)
    check = _compare(latent, latent.clone())
    assert check.equal
    assert (check.max_abs_diff, check.max_ulp, check.first_index) == (0.0, 0, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_ulp_is_found_and_placed(dtype: torch.dtype) -> None:
    latent = torch.randn(1, 2, 4, 3, 3).to(dtype)
    check = _compare(one_ulp_off(latent), latent)
    assert not check.equal
    assert check.max_ulp == 1
    # The fault is injected in the middle of 72 elements, at index 36.
    assert check.first_index == (0, 1, 0, 0, 0)
    assert 0 < check.max_abs_diff < 0.1


def test_zero_and_minus_zero_are_equal_numbers_of_other_bits() -> None:
    check = _compare(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (check.equal, check.max_abs_diff, check.max_ulp) == (False, 0.0, 0)


def test_nan_against_a_number_is_infinitely_far() -> None:
    check = _compare(torch.tensor([torch.nan]), torch.tensor([1.0]))
    assert not check.equal
    assert check.max_abs_diff == float("inf")


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


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.float16)])
def test_other_shapes_and_dtypes_are_a_programmers_error(other: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="against"):
        _compare(torch.zeros(2), other)


@pytest.mark.parametrize(
    ("what", "dtype", "most"), [("frames", torch.uint8, 255), ("audio", torch.int16, 32767)]
)
def test_levels_are_compared(what: Any, dtype: torch.dtype, most: int) -> None:
    levels = torch.zeros((2, 4, 4, 3), dtype=dtype)
    other = levels.clone()
    other[1, 2, 3, 0] = 5
    compare = partial(compare_tensors, what, place=Place(clip=0, step=4, rank=1))
    assert compare(levels, levels.clone()).equal
    for ours, theirs in ((other, levels), (levels, other)):
        check = compare(ours, theirs)
        assert (check.equal, check.max_ulp, check.first_index) == (False, 5, (1, 2, 3, 0))
        assert check.distance == f"5 of {most} levels"
        assert check.sha256 == hashlib.sha256(ours.numpy().tobytes()).hexdigest()
        assert (check.max_abs_diff, check.psnr_db) == (5 / most, None)


def test_verdict_names_the_first_difference() -> None:
    latent = torch.ones(3)
    good, bad = _compare(latent, latent), _compare(latent, latent + 1)
    assert VerificationResult((good, good)).bitwise
    verdict = VerificationResult((good, bad, bad))
    assert verdict.first_difference is bad
    report = verdict.to_json()
    assert report["schema_version"] == 1
    assert (report["equal"], report["bitwise"], report["max_abs_diff"]) == (False, False, 1.0)
    assert {"clip", "what", "step", "rank", "equal", "max_abs_diff", "sha256"} <= set(
        report["checks"][0]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_sha256_is_of_the_contiguous_bytes(dtype: torch.dtype) -> None:
    latent = torch.randn(2, 3, 5).to(dtype)
    raw = bytes(latent.view(torch.uint8).reshape(-1).tolist())
    assert tensor_sha256(latent) == hashlib.sha256(raw).hexdigest()
    turned = latent.transpose(0, 2)
    assert tensor_sha256(turned) == tensor_sha256(turned.contiguous())
    assert tensor_sha256(turned) != tensor_sha256(latent)


def test_evidence_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    tensor_store = TensorStore(tmp_path)
    latent = torch.randn(1, 2, 3).to(torch.bfloat16).transpose(0, 2)
    tensor_store.keep(3, "step7", {"latents": latent})
    assert torch.equal(tensor_store.load(3, "step7")["latents"], latent)
    assert (tensor_store.has(3, "step7"), tensor_store.has(3, "step8")) == (True, False)
    with pytest.raises(FileNotFoundError):
        tensor_store.load(3, "step8")
    with pytest.raises(ValueError, match="is not the name"):
        tensor_store.put("../clip3_step7", b"")
