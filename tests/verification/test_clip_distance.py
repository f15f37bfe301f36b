"""Comparison of finished clips within a tolerance, as far as their tensors are available."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling
from svdpp.config.tolerance import Tolerance
from svdpp.models.base import LATENTS
from svdpp.verification.clip_distance import measure_distances
from svdpp.verification.clip_files import ClipCheck, read_clip
from svdpp.verification.clip_result import ClipVerification, VerificationTask
from svdpp.worker.tensor_files import TensorStore
from tests.support.shell import DEMO, PHOTO, TINY, svdpp_here
from tests.verification.test_clip_files import frames_of, put_clip


@pytest.mark.parametrize(
    ("format", "atol", "verdict", "latent"),
    [
        ("frames", 3 / 255, "within tolerance", "unknown"),
        ("frames", 1 / 255, "different", "unknown"),
        ("mp4", 3 / 255, "different", "different"),
    ],
)
def test_the_frames_of_png_files_are_compared(
    tmp_path: Path, format: str, atol: float, verdict: str, latent: str
) -> None:
    """The frames of PNG files are compared within the tolerance, although the latent is not
    available.

    For an mp4, only the hash of the frames is available.
    """
    clip = read_clip(put_clip(tmp_path, "a", format))  # type: ignore[arg-type]
    expected = torch.from_numpy(frames_of(1).copy())
    expected[1, 2, 3, 0] += 2
    store = TensorStore(tmp_path)
    store.keep(0, "frames", {"frames": expected})
    store.keep(0, "step2", {LATENTS: torch.zeros(1, 3, 4, 4, 6)})
    config = PipelineConfig(
        world_size=1,
        model=ModelConfig(name="demo"),
        sampling=SvdSampling(num_inference_steps=2),
    )
    task = VerificationTask(clip=clip, config=config, request=ClipRequest(seed=1))
    whats = ("latent", "frames")
    checks = [ClipCheck(what=what, equal=False, recorded="a", found="b") for what in whats]  # type: ignore[arg-type]
    result = ClipVerification(path=clip.path, checks=checks)
    measure_distances([task], [result], store, Tolerance(atol=atol))
    assert result.verdict == verdict
    assert [check.verdict for check in result.checks] == [latent, verdict]
    if format == "frames":
        assert result.checks[1].max_ulp == 2
        assert "largest difference 2 of 255 levels" in result.checks[1].detail
        assert result.to_json()["verdict"] == verdict
    else:
        assert "only the hash is stored" in result.checks[1].detail


@pytest.mark.slow
def test_a_clip_of_a_pair_is_within_a_tolerance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clip that a CFG pair made can be verified within a tolerance.

    The pair makes the clip again, with the recorded bits. The tensors of this second clip are
    compared with those of diffusers.
    """
    monkeypatch.chdir(tmp_path)
    made = svdpp_here("run", PHOTO, *DEMO, *TINY, "--gpus", "2", "--cfg-parallel", "2", "-q")
    assert made.code == 0, made
    (path,) = tmp_path.glob("out/*.mp4")
    answer = svdpp_here("verify", str(path), "--atol", "0.1", "--json")
    assert answer.code == 0, answer
    report = json.loads(answer.out)
    assert report["verdict"] in ("bitwise equal", "within tolerance")
    strict = svdpp_here("verify", str(path), "--rtol", "1e-12", "--json")
    assert strict.code == (0 if report["verdict"] == "bitwise equal" else 3)
    refused = svdpp_here("verify", str(path), "--atol", "-1")
    assert refused.code == 2
    assert "--atol must be a finite number" in refused.err
