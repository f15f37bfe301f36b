"""Which of a draft's results are written, where, and which existing files stay."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from svdpp.config import ClipRequest, DraftConfig, OutputConfig
from svdpp.media import video
from svdpp.plan.draft import DraftPlan
from svdpp.worker.clip_writer import ClipWriter, WriterEvents
from svdpp.worker.draft_results import DraftResults, Result
from svdpp.worker.messages import ClipDone, ClipJob, DraftDone

STARTS = (0, 3, 5)


@dataclass
class _Told:
    """Collects the writer's events."""

    events: list[ClipDone | DraftDone] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def clip_writer(self) -> ClipWriter:
        events = WriterEvents(
            done=self.events.append,
            lost=lambda _, error: self.lost.append(f"clip: {error}"),
            draft_lost=lambda _, error: self.lost.append(f"draft: {error}"),
            failed=lambda error: self.lost.append(f"rank: {error!r}"),
        )
        return ClipWriter(events, {}, torch.device("cpu"), fps=7)

    @property
    def words(self) -> list[tuple[str, bool]]:
        return [(event.kind, event.metadata["exact"]) for event in self.events]


def _review_all(output: OutputConfig, accept_psnr_db: float | None = None) -> _Told:
    """Three results that differ little, from the fastest rank's to the exact one."""
    told = _Told()
    clip_writer = told.clip_writer()
    review = DraftResults(
        ClipJob(clip=0, request=ClipRequest(seed=0, output=output)),
        0.0,
        DraftPlan(num_steps=8, start_steps=STARTS),
        DraftConfig(start_steps=STARTS, accept_psnr_db=accept_psnr_db),
        clip_writer,
    )
    for rank in (2, 1, 0):
        latent, frames = torch.full((1, 2), rank), torch.full((2, 32, 32, 3), 100 + rank).byte()
        review.add(Result(rank=rank, latent=latent, frames=frames, seconds=1.0))
    clip_writer.finish()
    return told


@pytest.fixture
def folder_in_the_way(tmp_path: Path) -> Path:
    """A user's folder has the name of clip_0's draft, and is found too late."""
    folder = tmp_path / "clip_0.draft"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    return folder


def test_a_draft_that_cannot_be_written_costs_nothing_but_the_draft(
    folder_in_the_way: Path,
) -> None:
    output = OutputConfig(path=str(folder_in_the_way.parent / "clip_0"), format="frames")
    told = _review_all(output)
    assert told.words == [("clip", True)]
    (lost,) = told.lost
    assert lost.startswith("draft: ")
    assert "holds other files" in lost
    assert (folder_in_the_way / "notes.txt").read_text() == "mine"
    assert len(video.read_frames(Path(output.path), "frames")) == 2
    assert json.loads(Path(output.json_path).read_text())["exact"] is True


def test_an_accepted_draft_that_cannot_be_written_gives_way_to_the_exact_clip(
    folder_in_the_way: Path,
) -> None:
    output = OutputConfig(path=str(folder_in_the_way.parent / "clip_0"), format="frames")
    told = _review_all(output, accept_psnr_db=1.0)
    assert told.words == [("clip", True)]
    assert [lost.partition(":")[0] for lost in told.lost] == ["draft", "draft"]
    assert (folder_in_the_way / "notes.txt").exists()


def test_an_accepted_draft_is_the_last_word(tmp_path: Path) -> None:
    told = _review_all(
        OutputConfig(path=str(tmp_path / "clip_0"), format="frames"), accept_psnr_db=1.0
    )
    assert told.words == [("draft", False), ("clip", False)]
    assert not told.lost
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip_0.draft", "clip_0.draft.json"]


@pytest.mark.parametrize("format", ["frames", "gif"])
def test_the_exact_clip_takes_the_drafts_place(format: video.VideoFormat, tmp_path: Path) -> None:
    output = OutputConfig(path=str(tmp_path / f"clip_0{video.SUFFIXES[format]}"), format=format)
    told = _review_all(output)
    assert told.words == [("draft", False), ("clip", True)]
    assert sorted(tmp_path.iterdir()) == sorted([Path(output.path), Path(output.json_path)])
