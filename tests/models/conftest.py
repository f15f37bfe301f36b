"""Fixtures: tiny checkpoints that are saved once, a copy that tests may damage, and a hub."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest

from svdpp.models.hub import fetch_snapshot
from tests.support.local_hub import TOKEN, Hub, running_hub
from tests.support.range_checks import TinyModel, model_of, read_folder, source
from tests.support.tiny_families import save_tiny

if TYPE_CHECKING:
    from tests.support.family_case import Case


@pytest.fixture(scope="session")
def tiny_model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], TinyModel]:
    """Function that saves the tiny checkpoint of a test case, and returns a `TinyModel` of it."""

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
    """Function that returns the `TinyModel` for a test case's name, the same object each time."""
    from tests.support.tiny_families import CASES

    return functools.cache(lambda name: tiny_model_of(CASES[name]))


@pytest.fixture
def tiny(tiny_models: Callable[[str], TinyModel]) -> Path:
    """Folder of the tiny SVD checkpoint, which no test may change."""
    folder: Path = tiny_models("svd").checkpoint.folder
    return folder


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """Folder with a copy of the tiny SVD checkpoint, which a test may change."""
    return Path(shutil.copytree(tiny, tmp_path / "tiny"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty folder in which huggingface_hub caches its downloads.

    HF_TOKEN is set to a token that no message may contain.
    """
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fetch_snapshot.cache_clear()
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:  # noqa: ARG001
    """Stand-in for the Hugging Face hub, to which huggingface_hub sends its requests."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    huggingface_hub.close_session()
    with running_hub() as running:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.url)
        addresses = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", addresses)
        yield running
        huggingface_hub.close_session()
