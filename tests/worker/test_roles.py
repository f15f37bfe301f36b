"""Ranks load the parts that their actions need, and share them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.driver.pipeline import Pipeline
from tests.models.builders import save_tiny_checkpoint


@pytest.mark.processes
def test_each_rank_maps_the_weights_of_its_own_parts_alone(tmp_path: Path) -> None:
    """All ranks map the same file, so its weights are in memory once."""
    folder = save_tiny_checkpoint(tmp_path / "model")
    config = PipelineConfig(
        world_size=3,
        model=ModelConfig(name=str(folder)),
        sampling=SvdSampling(num_inference_steps=3, num_frames=2, height=64, width=64),
    )
    with Pipeline(config) as pipeline:
        pids: list[int] = pipeline._supervisor._group.pids  # type: ignore[union-attr, attr-defined]
        parts = {rank: _mapped_parts(pid, folder) for rank, pid in enumerate(pids)}
    assert parts == {
        0: {"image_encoder", "vae", "unet"},
        1: {"unet"},
        2: {"vae", "unet"},
    }


def _mapped_parts(pid: int, folder: Path) -> set[str]:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = {Path(line.split(maxsplit=5)[5]) for line in maps if str(folder) in line}
    return {os.path.relpath(path.parent, folder) for path in paths}
