"""What the environment says about a machine, and what it does not reveal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from svdpp import __version__
from svdpp.diagnostics import environment as module
from svdpp.diagnostics.environment import cpu_model, environment
from svdpp.launch import gpus
from svdpp.launch.gpus import available_bytes


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
    monkeypatch.setattr(module.svdpp, "__file__", str(tmp_path / "svdpp" / "__init__.py"))
    assert module._git() is None
    (tmp_path / ".git").mkdir()  # not a git repository
    assert module._git() is None


@pytest.mark.parametrize(("number", "text"), [(90100, "9.1.0"), (8902, "8.9.2"), (None, None)])
def test_cudnns_number_is_written_with_dots(number: int | None, text: str | None) -> None:
    assert module._dotted(number) == text
