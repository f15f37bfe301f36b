"""Fixtures: tiny checkpoints, each saved once, and a copy of SVD's for tests that damage it."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.models.range_checks import Row, model_of, read_folder, source
from tests.models.tiny_families import save_tiny

if TYPE_CHECKING:
    from tests.models.test_rows import Case


@pytest.fixture(scope="session")
def row_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Row]:
    """The clip and the ranks of a case, whose checkpoint is saved."""

    def row(case: Case) -> Row:
        folder = tmp_path_factory.mktemp(case.family)
        save_tiny(case.family, folder, image=case.image, **case.changes)
        checkpoint: Any = read_folder(folder, family=case.family)
        sampling = checkpoint.resolve(case.config())
        image = source(sampling) if case.image else None
        return Row(checkpoint, sampling, model_of(checkpoint, case.dtype), image)

    return row


@pytest.fixture(scope="session")
def rows(row_of: Callable[[Case], Row]) -> Callable[[str], Row]:
    """Each case of test_rows.py by name, its checkpoint saved once, its ranks loaded once."""
    from tests.models.test_rows import CASES

    return functools.cache(lambda name: row_of(CASES[name]))


@pytest.fixture
def tiny(rows: Callable[[str], Row]) -> Path:
    """SVD's."""
    folder: Path = rows("svd").checkpoint.folder
    return folder


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy of SVD's."""
    return Path(shutil.copytree(tiny, tmp_path / "tiny"))
