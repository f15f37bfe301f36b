"""What `env` says about a machine and does not reveal, and how `doctor` fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from svdpp import __version__
from svdpp.config import ModelConfig, PipelineConfig
from svdpp.diagnostics import machine
from svdpp.diagnostics.machine import cpu_model, environment
from svdpp.launch import gpus
from svdpp.launch.gpus import available_bytes
from svdpp.verification.verify import Place, VerificationResult, compare_tensors


def test_no_secret_and_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    monkeypatch.setenv("NCCL_AUTH_SECRET", "shibboleth")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    facts = environment()
    text = json.dumps(facts)

    assert str(tmp_path) not in text
    assert "a" * 34 not in text
    assert "shibboleth" not in text
    assert facts["variables"]["TMPDIR"] == "~/scratch"
    assert facts["variables"]["OMP_NUM_THREADS"] == "3"
    assert "HF_TOKEN" not in facts["variables"]


def test_versions_and_host() -> None:
    facts = environment()

    assert facts["schema_version"] == 1
    assert facts["versions"]["svdpp"] == __version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["host"]["cpu"] == cpu_model() != ""
    assert 0 < available_bytes() <= facts["host"]["memory_bytes"]
    assert len(facts["devices"]["gpus"]) == len(gpus.visible_gpus())
    assert facts["ffmpeg"]["version"]


def test_commit_and_state_are_those_of_a_checkout_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine.svdpp, "__file__", str(tmp_path / "svdpp" / "__init__.py"))
    assert machine._git() is None
    (tmp_path / ".git").mkdir()  # not a git repository
    assert machine._git() is None


def test_a_difference_fails_the_cut_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.zeros(1, 1, 4, 2, 2), torch.ones(1, 1, 4, 2, 2)
    result = VerificationResult((compare_tensors("latent", one, other, Place(0, 1, 0)),))
    monkeypatch.setattr(machine, "verify", lambda *_: result)
    names = ("devices", "cut test")
    monkeypatch.setattr(machine, "_CHECKS", {name: machine._CHECKS[name] for name in names})
    config = PipelineConfig(world_size=1, model=ModelConfig(name="demo"))
    *_, check = machine.examine(config, tmp_path)
    assert (check.verdict, check.exit_code) == ("failed", 3)
    assert check.detail.startswith("other bits than diffusers' whole call: clip 0, the latent")
