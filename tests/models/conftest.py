"""Fixtures: tiny checkpoints, each saved once, and a copy of SVD's for tests that damage it."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.builders import save_tiny_checkpoint

Save = Callable[[Callable[[Path], Path]], Path]


@pytest.fixture(scope="session")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Saves the checkpoint of each function once, and returns its folder."""
    return functools.cache(lambda make: make(tmp_path_factory.mktemp("saved") / "tiny"))


@pytest.fixture(scope="session")
def tiny(save: Save) -> Path:
    """SVD's."""
    return save(save_tiny_checkpoint)


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy of SVD's."""
    return Path(shutil.copytree(tiny, tmp_path / "tiny"))
