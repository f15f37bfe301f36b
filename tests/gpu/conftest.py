"""Fixtures for tests that need a GPU or the rehearsal on the CPU; other machines skip them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModelWithProjection

from svdpp.config import ModelConfig
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine.load import silence_libraries
from tests.gpu.machine import REHEARSAL, Machine, Report, find_machine
from tests.support.builders import save_tiny_checkpoint
from tests.support.families.svd import svd_scheduler


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the GPU tests, and skip those that this machine cannot run."""
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
    """Report of the values that the GPU tests measure.

    Its files are in the folder GPU_REPORT, or in the working folder.
    """
    folder = Path(os.environ.get("GPU_REPORT", "."))
    folder.mkdir(parents=True, exist_ok=True)
    return Report(folder)


@pytest.fixture(scope="session")
def full_size(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a checkpoint with random weights: of SVD-XT's size, or tiny if sizes are small."""
    folder = tmp_path_factory.mktemp("full-size") / "model"
    return save_tiny_checkpoint(folder) if machine.is_small else _save_full_size(folder)


def _save_full_size(folder: Path) -> Path:
    silence_libraries()
    published = find_checkpoint(ModelConfig(), weights=False).folder
    kinds: dict[str, Any] = {
        "unet": diffusers.UNetSpatioTemporalConditionModel,
        "vae": diffusers.AutoencoderKLTemporalDecoder,
    }
    torch.manual_seed(0)
    with torch.device("cuda:0"):
        parts = {
            name: kind.from_config(kind.load_config(published / name))
            for name, kind in kinds.items()
        }
        config = CLIPVisionConfig.from_pretrained(published / "image_encoder")
        parts["image_encoder"] = CLIPVisionModelWithProjection(config)
    pipeline = diffusers.StableVideoDiffusionPipeline(
        **{name: part.half().cpu() for name, part in parts.items()},
        scheduler=svd_scheduler(),
        feature_extractor=CLIPImageProcessorPil(),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
