"""Owns what tests of several commands replace because it takes long and has its own test."""

from __future__ import annotations

import pytest

from svdpp.diagnostics import memory_estimate


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the memory estimate of a dry run, which takes a second and has its own test."""
    monkeypatch.setattr(memory_estimate, "estimate_ranks", lambda *_, **__: [])
