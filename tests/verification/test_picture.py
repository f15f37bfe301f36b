"""The picture of a proof shows both sides, and every difference at its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.verification.picture import draw_differences
from svdpp.verification.verify import compare, new_side
from svdpp.worker.tensor_store import TensorStore

DUMMY = PipelineConfig(
    world_size=2,
    model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8)),
    sampling=SvdSampling(num_inference_steps=2),
)
DEMO = PipelineConfig(
    world_size=2, model=ModelConfig(name="demo"), sampling=SvdSampling(num_inference_steps=2)
)


def _drawn(
    config: PipelineConfig, folder: Path, latents: list[torch.Tensor], frames: list[np.ndarray]
) -> np.ndarray:
    """The picture of two clips: equal ones, and those of the two sides given; by rows."""
    for side, latent, pictures in zip(("pipelined", "sequential"), latents, frames, strict=True):
        store = TensorStore(new_side(folder / side, config))
        for clip, kept in enumerate((torch.zeros_like(latent), latent)):
            for step in (1, 2):
                store.keep_latent(clip, step, kept)
            store.keep_frames(clip, pictures * clip)
    draw_differences(folder / "a.png", compare(config, 2, folder), config, folder)
    sheet = np.asarray(Image.open(folder / "a.png"))
    return np.stack(np.split(sheet, 3))


def _bright(picture: np.ndarray) -> list[list[int]]:
    """The corners of what is not black, below the title."""
    places = np.argwhere(picture[16:].max(-1) > 0)
    return [places.min(0).tolist(), places.max(0).tolist()]


@pytest.mark.parametrize("level", [1, 200])
def test_one_level_of_one_pixel_is_a_bright_dot(level: int, tmp_path: Path) -> None:
    latent = torch.ones(1, 5, 4, 8, 8)
    frames = [np.full((5, 128, 130, 3), 7, np.uint8) for _ in range(2)]
    frames[0][3, 40, 50, 0] = 7 + level
    rows = _drawn(DEMO, tmp_path, [latent, latent], frames)

    assert rows.shape == (3, 128 + 16, 130 * 4, 3)  # frames 0, 2, 3 and 4
    assert _bright(rows[2][:, 260:390]) == [[38, 48], [42, 52]]
    assert rows[2][16 + 40, 260 + 50].tolist() == [255] * 3
    assert not rows[2][16:, :260].any()
    assert rows[1][17, 0].tolist() == [7] * 3


def test_one_ulp_of_a_latent_is_shown_in_its_plane(tmp_path: Path) -> None:
    latent = torch.full((1, 4, 2, 8, 8), 1.5)
    other = latent.clone()
    other[0, 1, 1, 2, 4] = torch.nextafter(torch.tensor(1.5), torch.tensor(2.0))
    frames = [np.zeros((1, 8, 8, 3), np.uint8)] * 2
    rows = _drawn(DUMMY, tmp_path, [other, latent], frames)

    # Planes 0, 3 and 7, enlarged 16 times; plane 3 is that of channel 1 in frame 1.
    assert rows.shape == (3, 128 + 16, 128 * 3, 3)
    assert _bright(rows[2][:, 128:256]) == [[30, 62], [49, 81]]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_shown_as_well(value: float, tmp_path: Path) -> None:
    latent = torch.ones(1, 4, 2, 8, 8)
    other = latent.clone()
    other[0, 0, 0, 0, 0] = value
    frames = [np.zeros((1, 8, 8, 3), np.uint8)] * 2
    assert _drawn(DUMMY, tmp_path, [other, latent], frames)[2].any()
