"""Owns the check whether a clip's file is the one that its metadata describes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from svdpp.config import OutputConfig
from svdpp.errors import InputError
from svdpp.launch import temp_folders
from svdpp.media import video
from svdpp.media.distance import distance
from svdpp.models.base import Frames
from svdpp.verification.clip_files import ClipOnDisk
from svdpp.worker.clip_metadata import embedded_part

# Versions of an encoder agree better than this (above 40 dB at every --crf up to 30), and different
# videos far worse.
_SIMILAR_DB = 30.0


@dataclass(frozen=True, kw_only=True)
class ClipCheck:
    """One of the verdicts on a finished clip.

    Args:
        what: the final latent, the frames, or the file on disk.
        equal: whether it is as recorded.
        recorded: the sha256 in the metadata; None if it has none.
        found: the sha256 of the recomputed tensor or of the file; None if there is no file.
        detail: what is wrong; if nothing is, what the check shows.
    """

    what: Literal["latent", "frames", "file"]
    equal: bool
    recorded: str | None
    found: str | None
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def check_file(clip: ClipOnDisk, frames: Frames) -> ClipCheck:
    """Compares a clip's file with its metadata, and its pixels with the recomputed frames.

    PNG frames are lossless, so their pixels must be the recorded ones. The other formats are
    lossy: their pixels are compared with the recomputed frames, encoded here with the same
    settings. The same encoder gives equal pixels, another version similar ones.

    Args:
        clip: the clip; its file may be missing.
        frames: recomputed, uint8, shape (F, H, W, 3).
    """
    recorded, found = clip.metadata["file_sha256"], None
    if not os.path.exists(clip.path):
        missing = f"there is no {clip.path.name!r}"
        return ClipCheck(what="file", equal=False, recorded=recorded, found=None, detail=missing)
    try:
        found = video.file_sha256(clip.path)
        faults = [*_wrong_with_bytes(clip, found), *_wrong_with_metadata(clip)]
        shown, is_same = _compare_pixels(clip, frames)
    except InputError as error:
        faults, shown, is_same = [str(error)], "", False
    if not is_same and shown:
        faults.append(shown)
    if recorded is None:
        shown += "; no sha256 of the file is recorded"
    detail = "; ".join(faults) if faults else shown
    return ClipCheck(what="file", equal=not faults, recorded=recorded, found=found, detail=detail)


def _wrong_with_bytes(clip: ClipOnDisk, found: str) -> Iterator[str]:
    recorded = clip.metadata["file_sha256"]
    if recorded not in (None, found):
        yield "its sha256 is not the recorded one: it was changed or replaced"


def _wrong_with_metadata(clip: ClipOnDisk) -> Iterator[str]:
    if clip.json_path is None:
        return
    inside, beside = video.read_metadata(clip.path), embedded_part(clip.raw)
    for name in dict.fromkeys((*beside, *inside)):
        if inside.get(name) != beside.get(name):
            yield (
                f"the metadata inside says {name} {_short(inside, name)}, "
                f"the JSON {_short(beside, name)}"
            )
            return


def _short(values: Mapping[str, Any], name: str) -> str:
    text = repr(values[name]) if name in values else "nothing"
    return text if len(text) <= 40 else text[:37] + "..."


def _compare_pixels(clip: ClipOnDisk, frames: Frames) -> tuple[str, bool]:
    """A sentence about the file's pixels, and whether they are this clip's."""
    kind = clip.metadata["format"]
    ours = video.read_frames(clip.path, kind)
    if kind == "frames":
        is_same = video.frames_sha256(ours) == clip.metadata["frames_sha256"]
        return (
            ("lossless: its pixels are the recorded frames, bit for bit", True)
            if is_same
            else ("its pixels are not the recorded frames", False)
        )
    theirs = _encoded_again(clip, frames)
    if ours.shape != theirs.shape:
        return f"it holds {_size(ours)} instead of {_size(theirs)}", False
    apart = distance(ours, theirs).whole
    shown = f"{kind} is lossy: its pixels against those of the recomputed frames, encoded here"
    return f"{shown}: {apart}", apart.psnr_db >= _SIMILAR_DB


def _encoded_again(clip: ClipOnDisk, frames: Frames) -> Frames:
    """The pixels of the recomputed frames after encoding them with the clip's settings."""
    metadata = clip.metadata
    with temp_folders.folder("svdpp-verify-") as folder:
        suffix = video.SUFFIXES[metadata["format"]]
        output = OutputConfig(
            path=str(folder / f"again{suffix}"), format=metadata["format"], crf=metadata["crf"]
        )
        video.write_clip(frames, output, fps=metadata["fps"], metadata={})
        return video.read_frames(Path(output.path), output.format)


def _size(frames: Frames) -> str:
    count, height, width, _ = frames.shape
    return f"{count} frames of {width}x{height}"
