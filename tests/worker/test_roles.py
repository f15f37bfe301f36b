"""Ranks load the parts that their actions need, and share the pages of the weights' files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling, WanSampling
from svdpp.driver.pipeline import Pipeline
from tests.driver.dummies import pids
from tests.models.builders import save_tiny_checkpoint
from tests.models.tiny_families import save_tiny_wan

pytestmark = pytest.mark.processes


def _mapped(pid: int, folder: Path) -> dict[str, Counter[str]]:
    """PSS and RSS of a process in bytes, by the subfolder of `folder` whose files it maps."""
    found: dict[str, Counter[str]] = {"Pss": Counter(), "Rss": Counter()}
    for region in psutil.Process(pid).memory_maps():
        path = Path(region.path)
        if path.is_relative_to(folder):
            found["Pss"][path.parent.name] += region.pss
            found["Rss"][path.parent.name] += region.rss
    return found


def test_each_rank_maps_the_weights_of_its_own_parts_alone(tmp_path: Path) -> None:
    folder = save_tiny_checkpoint(tmp_path / "model")
    config = PipelineConfig(
        world_size=3,
        model=ModelConfig(name=str(folder)),
        sampling=SvdSampling(num_inference_steps=3, num_frames=2, height=64, width=64),
    )
    with Pipeline(config) as pipeline:
        parts = [set(_mapped(pid, folder)["Pss"]) for pid in pids(pipeline)]
    assert parts == [{"image_encoder", "vae", "unet"}, {"unet"}, {"vae", "unet"}]


def test_four_ranks_hold_one_copy_of_each_expert(tmp_path: Path) -> None:
    folder = save_tiny_wan(tmp_path / "wan", boundary_ratio=0.875, dtype=torch.bfloat16, width=8)
    config = PipelineConfig(
        world_size=4,
        split="balanced",
        model=ModelConfig(name=str(folder), dtype="bf16"),
        sampling=WanSampling(num_inference_steps=4, height=32, width=32, num_frames=5),
    )
    with Pipeline(config) as pipeline:
        held = [roles.experts for roles in pipeline.config.layout.roles]
        ranks = [_mapped(pid, folder) for pid in pids(pipeline)]
    assert held == [{0}, {0}, {1}, {1}]
    for part, holders in (("transformer", ranks[:2]), ("transformer_2", ranks[2:])):
        assert [part in rank["Rss"] for rank in ranks] == [rank in holders for rank in ranks]
        pss = sum(rank["Pss"][part] for rank in holders)
        most = max(rank["Rss"][part] for rank in holders)
        assert most > 0
        # A rank may not have touched all pages; two copies would be twice the larger one.
        assert pss == pytest.approx(most, rel=0.1)
