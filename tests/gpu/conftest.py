"""Every test here needs a GPU, or the rehearsal; without either it is skipped, and says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.checkpoints import save_checkpoint
from tests.gpu.machine import REHEARSAL, Machine, Report, find_machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder, and skips those that this machine cannot run."""
    machine, here = find_machine(), Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        needed = item.get_closest_marker("num_gpus")
        count = needed.args[0] if needed else 1
        if machine.is_rehearsal:
            if item.get_closest_marker("no_rehearsal"):
                item.add_marker(pytest.mark.skip(reason="needs a real GPU"))
        elif machine.num_gpus < count:
            found = f"{machine.num_gpus} GPUs found, {count} needed; {REHEARSAL}=1 tries the code"
            item.add_marker(pytest.mark.skip(reason=found))


@pytest.fixture(scope="session")
def machine() -> Machine:
    return find_machine()


@pytest.fixture(scope="session")
def report() -> Report:
    """Takes the figures; the files are in the folder that GPU_REPORT names, or here."""
    folder = Path(os.environ.get("GPU_REPORT", "."))
    folder.mkdir(parents=True, exist_ok=True)
    return Report(folder)


@pytest.fixture(scope="session")
def full_size(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of SVD-XT's size with random weights in fp16; a tiny one at small sizes."""
    folder = tmp_path_factory.mktemp("full-size") / "model"
    return save_checkpoint(folder, full_size=not machine.is_small)


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
