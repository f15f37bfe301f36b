"""Fixtures: tiny checkpoints, each saved once, and a copy of SVD's for tests that damage it."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models.range_checks import Row, model_of, read_folder, source
from tests.models.tiny_families import save_tiny


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Row]:
    """Each case of test_rows.py by name, its checkpoint saved once, its ranks loaded once."""
    from tests.models.test_rows import CASES

    @functools.cache
    def row(name: str) -> Row:
        case = CASES[name]
        folder = save_tiny(
            case.family, tmp_path_factory.mktemp(name), image=case.image, **case.changes
        )
        checkpoint: Any = read_folder(folder, family=case.family)
        sampling = checkpoint.resolve(case.config())
        image = source(sampling) if case.image else None
        return Row(checkpoint, sampling, model_of(checkpoint, case.dtype), image)

    return row


@pytest.fixture
def tiny(rows: Callable[[str], Row]) -> Path:
    """SVD's."""
    folder: Path = rows("svd").checkpoint.folder
    return folder


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy of SVD's."""
    return Path(shutil.copytree(tiny, tmp_path / "tiny"))
