"""What tests of several commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from svdpp.driver import pipeline, resolve


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the memory estimate of a dry run, which takes a second and has its own test."""
    monkeypatch.setattr(resolve, "estimate_ranks", lambda *_, **__: [])


@pytest.fixture
def without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that would start ranks."""

    def go_on(*_: object) -> None:
        raise AssertionError("ranks would have been started")

    monkeypatch.setattr(pipeline.Pipeline, "__enter__", go_on)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes an empty folder the working folder."""
    monkeypatch.chdir(tmp_path)
