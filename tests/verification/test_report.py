"""The page states the verdict, shows both sides, and does not reveal the user's name."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling
from svdpp.verification.report import write_report
from svdpp.verification.result import VerificationResult
from svdpp.verification.verify import compare, new_side
from svdpp.worker.tensor_store import TensorStore

DUMMY = PipelineConfig(
    world_size=2,
    model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8)),
    sampling=SvdSampling(num_inference_steps=2),
)


def _keep(config: PipelineConfig, folder: Path, num_clips: int) -> None:
    """Equal latents and frames of both sides, as the two runs keep them."""
    for side in ("pipelined", "sequential"):
        tensor_store = TensorStore(new_side(folder / side, config))
        for clip in range(num_clips):
            for step in (1, 2):
                tensor_store.keep_latent(clip, step, torch.full((1, 4, 2, 8, 8), clip + 0.5))
            if config.decodes:
                tensor_store.keep_frames(clip, np.full((4, 16, 24, 3), clip, np.uint8))


def _page(
    config: PipelineConfig, folder: Path, requests: list[ClipRequest]
) -> tuple[VerificationResult, str]:
    verdict = compare(config, len(requests), folder)
    path = folder / "report.html"
    asked, conditions = {"planted fault": "<none>"}, {"cudnn_tf32": "as the ranks have it"}
    write_report(path, verdict, config, requests, folder, asked, conditions)
    return verdict, path.read_text()


def _rows(page: str) -> list[list[str]]:
    """The texts of all cells, by row."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    cells = (re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows)
    return [[re.sub(r"<[^>]*>", "", cell) for cell in row] for row in cells]


OUTLINE = np.array([255, 82, 82])


def _pictures(page: str) -> list[np.ndarray]:
    """All pictures of the page, as RGB."""
    found = re.findall(r'src="data:image/png;base64,([^"]*)"', page)
    images = (Image.open(io.BytesIO(base64.b64decode(data))) for data in found)
    return [np.asarray(image.convert("RGB")) for image in images]


def test_equal_sides(tmp_path: Path) -> None:
    _keep(DUMMY, tmp_path, 2)
    verdict, page = _page(DUMMY, tmp_path, [ClipRequest(seed=3), ClipRequest(seed=4)])

    assert '<div class="verdict good"><b>bitwise equal</b>' in page
    assert "2 clips, 4 comparisons" in page
    assert page.startswith("<!DOCTYPE html>")
    assert not re.search(r"<script|<link|@import|url\(|https?:", page), "nothing beside itself"
    rows = _rows(page)
    for check in verdict.checks:
        what = check.what.replace("_", " ")
        row = [str(check.clip), what, str(check.step), str(check.rank), "bitwise equal"]
        assert [*row, "0", "", check.sha256[:16]] in rows
    assert page.count("<img ") == 2 * 3 * 3
    assert page.count("No element differs") == 2
    for condition in (
        ["threads of each rank", "1"],
        ["dtype", "fp32"],
        ["planted fault", "&lt;none&gt;"],
        ["cudnn tf32", "as the ranks have it"],
    ):
        assert condition in rows
    assert any(row[:1] == ["versions"] and f"torch {torch.__version__}" in row[1] for row in rows)


def test_one_ulp_is_named_and_its_clip_comes_first(tmp_path: Path) -> None:
    _keep(DUMMY, tmp_path, 2)
    latent = torch.full((1, 4, 2, 8, 8), 1.5)
    latent[0, 3, 1, 0, 2] = torch.nextafter(torch.tensor(1.5), torch.tensor(2.0))
    TensorStore(tmp_path / "pipelined").keep_latent(1, 2, latent)
    _, page = _page(DUMMY, tmp_path, [ClipRequest(seed=3), ClipRequest(seed=4)])

    place = "frame 1, channel 3, row 0, column 2"
    assert '<div class="verdict bad"><b>different</b>' in page
    assert (
        f"clip 1, the final latent, done by rank 1: first at {place} (index [0, 3, 1, 0, 2])"
        in page
    )
    assert re.findall(r"<h2>(Clip [^<]*)", page) == ["Clip 1: seed 4", "Clip 0: seed 3"]
    assert "1 of 512 elements differ" in page
    assert f"Largest difference: 1.19e-07, at {place} (index [0, 3, 1, 0, 2])" in page
    assert "1.50000012 against 1.5." in page
    assert "<th>frame 1, channel 3</th>" in page
    (row,) = (row for row in _rows(page) if row[:3] == ["1", "final latent", "2"])
    assert row[4:7] == ["different", "1.19e-07 (1 ULP)", place]
    outlined = [picture for picture in _pictures(page)[:12] if (picture == OUTLINE).all(-1).any()]
    assert len(outlined) == 1, "in the map of its plane alone"


@pytest.fixture
def local(tmp_path: Path) -> PipelineConfig:
    (tmp_path / "checkpoint").mkdir()
    return PipelineConfig(
        world_size=2,
        model=ModelConfig(name=str(tmp_path / "checkpoint")),
        sampling=SvdSampling(num_inference_steps=2),
    )


def test_no_path_of_this_machine_is_in_it(local: PipelineConfig, tmp_path: Path) -> None:
    _keep(local, tmp_path, 1)
    request = ClipRequest(seed=5, image=str(tmp_path / "my <photo>.jpg"))
    _, page = _page(local, tmp_path, [request])

    assert "Clip 0: my &lt;photo&gt;.jpg, seed 5" in page
    assert ["model", "checkpoint"] in _rows(page)
    for part in (str(tmp_path), str(Path.home()), tmp_path.name):
        assert part not in page


def test_frames_are_shown_and_many_clips_are_left_to_the_table(
    local: PipelineConfig, tmp_path: Path
) -> None:
    _keep(local, tmp_path, 6)
    frames = np.full((4, 16, 24, 3), 5, np.uint8)
    frames[1, 2, 3, 0] = 8
    TensorStore(tmp_path / "pipelined").keep_frames(5, frames)
    _, page = _page(local, tmp_path, [ClipRequest(seed=seed, image="a.jpg") for seed in range(6)])

    shown = re.findall(r"<h2>Clip (\d)", page)
    assert shown == ["5", "0", "1", "2"]
    assert "2 further clips" in page
    place = "frame 1, channel 0, row 2, column 3"
    assert f"Largest difference: 3 of 255 levels, at {place} (index [1, 2, 3, 0])" in page
    (row,) = (row for row in _rows(page) if row[:2] == ["5", "frames"])
    assert row[4:7] == ["different", "3 of 255 levels", place]
    assert sum(row[:2] == ["4", "frames"] for row in _rows(page)) == 1


def test_text_of_strangers_is_escaped_and_shown_as_far_as_it_is_text(
    local: PipelineConfig, tmp_path: Path
) -> None:
    _keep(local, tmp_path, 1)
    request = ClipRequest(seed=5, image=str(tmp_path / "<script>caf\udce9.jpg"))
    _, page = _page(local, tmp_path, [request])
    assert "Clip 0: &lt;script&gt;caf?.jpg, seed 5" in page
    assert "<script>" not in page
