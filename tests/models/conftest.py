"""Fixtures: tiny checkpoints, each saved once, and a copy of SVD's for tests that damage it."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.range_checks import TinyModel, model_of, read_folder, source
from tests.support.tiny_families import save_tiny

if TYPE_CHECKING:
    from tests.support.family_case import Case


@pytest.fixture(scope="session")
def tiny_model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], TinyModel]:
    """The clip and the ranks of a case, whose checkpoint is saved."""

    def tiny_model(case: Case) -> TinyModel:
        folder = tmp_path_factory.mktemp(case.family)
        save_tiny(case.family, folder, image=case.image, **case.changes)
        checkpoint: Any = read_folder(folder, family=case.family)
        sampling = checkpoint.resolve_sampling(case.config())
        image = source(sampling) if case.image else None
        return TinyModel(checkpoint, sampling, model_of(checkpoint, case.dtype), image)

    return tiny_model


@pytest.fixture(scope="session")
def tiny_models(tiny_model_of: Callable[[Case], TinyModel]) -> Callable[[str], TinyModel]:
    """Each case of test_registry.py by name, its checkpoint saved once, its ranks loaded once."""
    from tests.support.tiny_families import CASES

    return functools.cache(lambda name: tiny_model_of(CASES[name]))


@pytest.fixture
def tiny(tiny_models: Callable[[str], TinyModel]) -> Path:
    """SVD's."""
    folder: Path = tiny_models("svd").checkpoint.folder
    return folder


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy of SVD's."""
    return Path(shutil.copytree(tiny, tmp_path / "tiny"))
