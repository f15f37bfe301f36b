"""Ranks hold what their actions need, and share it with each other."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from svdpp.config import ModelConfig, PipelineConfig, SamplingConfig
from svdpp.runtime.pipeline import Pipeline
from tests.faults.processes import ranks_below
from tests.models.builders import save_tiny_checkpoint


@pytest.mark.processes
def test_each_rank_maps_the_weights_of_its_own_parts_alone(tmp_path: Path) -> None:
    """Mapped from the one file: what several ranks hold is in memory once."""
    folder = save_tiny_checkpoint(tmp_path / "model")
    before = set(ranks_below(Path(tempfile.gettempdir())).values())
    config = PipelineConfig(
        world_size=3,
        model=ModelConfig(name=str(folder)),
        sampling=SamplingConfig(num_inference_steps=3, num_frames=2, height=64, width=64),
    )
    with Pipeline(config) as pipeline:
        del pipeline
        ranks = ranks_below(Path(tempfile.gettempdir()))
        assert len(ranks) == 3
        assert not before & set(ranks.values())
        parts = {rank: _mapped_parts(pid, folder) for rank, pid in ranks.items()}
    assert parts == {
        0: {"image_encoder", "vae", "unet"},
        1: {"unet"},
        2: {"vae", "unet"},
    }


def _mapped_parts(pid: int, folder: Path) -> set[str]:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = {Path(line.split(maxsplit=5)[5]) for line in maps if str(folder) in line}
    return {os.path.relpath(path.parent, folder) for path in paths}
