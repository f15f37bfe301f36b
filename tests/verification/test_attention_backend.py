"""Attention backends: runs, resumed runs, and verification of their clips."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, WanSampling
from svdpp.config.tolerance import Tolerance
from svdpp.verification.result import CheckLocation, VerificationResult, compare_tensors
from svdpp.verification.verify import run_pipelined
from tests.support.shell import Answer, assert_error, parsed, svdpp_here
from tests.support.tiny_families import save_tiny_wan

MATH = "_native_math"
SMALL = ["--frames", "5", "--height", "32", "--width", "32", "--max-prompt-tokens", "8"]
SMALL += ["--steps", "2", "--device", "cpu", "--threads", "1", "--prompt", "a cat"]


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_wan(tmp_path_factory.mktemp("files") / "wan")


def ask(command: str, folder: Path, *more: str) -> Answer:
    return svdpp_here(command, "--model", str(folder), *SMALL, *more)


def metadata_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.slow
def test_clips_are_recorded_resumed_and_proven_with_their_backend(
    wan: Path, tmp_path: Path
) -> None:
    """A clip's backend is recorded in its JSON, so `verify` needs no option for it.

    `--resume` refuses another backend.
    """
    out = ("--world", "1", "--out", str(tmp_path))
    made = ask("run", wan, *out, "--attention-backend", MATH)
    assert made.code == 0, made
    (clip,) = tmp_path.glob("*.mp4")
    before = metadata_of(tmp_path / f"{clip.name}.json")
    assert before["attention_backend"] == before["conditions"]["attention_backend"] == MATH
    assert before["conditions"]["attention_repeats"] is True
    assert before["exact"] is True
    proven = svdpp_here("verify", str(clip))
    assert proven.code == 0, proven

    kept = ask("run", wan, *out, "--attention-backend", MATH, "--resume")
    assert kept.code == 0, kept
    assert metadata_of(tmp_path / f"{clip.name}.json") == before
    other = ask("run", wan, *out, "--resume")
    assert_error(
        other, 2, f"exists with another value of attention_backend: {MATH!r} instead of None"
    )


@pytest.mark.slow
@pytest.mark.full
def test_all_ranks_and_the_reference_have_the_backend(wan: Path) -> None:
    """All ranks and the reference use the backend. The latents after each rank are compared."""
    answer = ask("verify", wan, "--world", "2", "--attention-backend", MATH, "--json")
    assert answer.code == 0, answer
    result = json.loads(answer.out)
    assert result["verdict"] == "bitwise equal"
    assert result["conditions"]["attention_backend"] == MATH


@pytest.mark.parametrize("command", ["run", "verify", "serve"])
def test_commands_take_the_backend(wan: Path, command: str) -> None:
    line = f"svdpp {command} --model {wan} --device cpu --attention-backend {MATH}"
    request = parsed(line)["options"].request(num_clips=1, device="cpu", from_image=False)
    assert request.resolve()[0].model.attention_backend == MATH


def test_refused_backends_are_named_by_their_option(wan: Path) -> None:
    for name, words in (
        ("nativ", "diffusers has no --attention-backend 'nativ'"),
        ("flash_hub", "--attention-backend flash_hub is refused"),
    ):
        answer = ask("run", wan, "--attention-backend", name, "--dry-run")
        assert_error(answer, 2, words)


# --- backends whose bits differ between calls ----------------------------------------------------


def make_noisy(_: int) -> None:
    """Make torch's attention give different bits in each call in this rank, as a planted fault."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    backends, native = _AttentionBackendRegistry._backends, AttentionBackendName.NATIVE
    real, calls = backends[native], []

    def noisy(**arguments: Any) -> torch.Tensor:
        calls.append(1)
        result: torch.Tensor = real(**arguments) + 1e-6 * len(calls)
        return result

    backends[native] = noisy


@pytest.mark.slow
@pytest.mark.full
def test_clips_of_a_backend_that_does_not_repeat_are_not_called_exact(
    wan: Path, tmp_path: Path
) -> None:
    sampling = WanSampling(
        **{"num_inference_steps": 2, "num_frames": 5, "height": 32, "width": 32},
        max_sequence_length=8,
        from_image=False,
    )
    model = ModelConfig(name=str(wan), attention_backend="native")
    config = PipelineConfig(world_size=1, model=model, sampling=sampling)
    request = ClipRequest(seed=0, prompt="a cat")
    (made,) = run_pipelined(config, [request], tmp_path, make_noisy)
    assert made["conditions"]["attention_repeats"] is False
    assert made["exact"] == "unproven"


def test_the_verdict_says_that_the_backend_does_not_repeat() -> None:
    one, other = torch.zeros(1, 1, 4, 2, 2), torch.full((1, 1, 4, 2, 2), 1e-6)
    location, conditions = CheckLocation(0, 1, 0), {"attention_backend": "sage"}
    remark = ". The attention backend sage gives different bits for equal inputs here"
    for ours, tolerance, verdict, end in (
        (one, Tolerance(), "bitwise equal", ": only a tolerance (atol) allows for that"),
        (other, Tolerance(), "not equal", ": only a tolerance (atol) allows for that"),
        (other, Tolerance(atol=1e-3), "within tolerance", ""),
        (other, Tolerance(atol=1e-9), "different", ""),
    ):
        check = compare_tensors("latent", ours, one, location, tolerance=tolerance)
        unknown = {**conditions, "attention_repeats": False}
        result = VerificationResult((check,), unknown, tolerance)
        assert str(result).startswith(verdict)
        assert str(result).endswith(f"{remark}{end}")
        repeats = replace(result, conditions={**conditions, "attention_repeats": True})
        assert "attention" not in str(repeats)
