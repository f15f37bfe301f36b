"""Finished clips on disk: search for clips and their inputs, and the check of a clip's file.

The user names a clip by the clip's JSON, by its file (a video or a folder of frames), or by a
folder of several clips. The files are untrusted, so sizes are limited and all values are checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from svdpp.config import OutputConfig
from svdpp.config.limits import read_small_file
from svdpp.config.pipeline import ENCODING_FIELDS, LAST_IMAGE, reference_names
from svdpp.driver.clip_metadata import check_clip_metadata, embedded_part, parse_clip_json
from svdpp.driver.clip_table import CLIP_TABLE
from svdpp.driver.output_policy import MANIFEST
from svdpp.errors import InputError, RequestError, located_path, pluralize
from svdpp.launch.process_lifetime import temp_folder
from svdpp.media import video
from svdpp.media.images import read_bytes
from svdpp.media.inputs import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from svdpp.media.video import Frames
from svdpp.models.files import short_repr

_FIRST_FRAME = "00000.png"
_VIDEOS = (".mp4", ".gif", ".webp")


@dataclass(frozen=True, kw_only=True)
class ClipOnDisk:
    """Paths and metadata of a finished clip on disk."""

    path: Path
    """Path of the video or of the folder of frames, which may be missing."""
    json_path: Path | None
    """Path of the clip's JSON. None: there is no JSON, and the metadata were read from the clip's
    file."""
    raw: Mapping[str, Any]
    """Metadata as they were read, without checks."""
    metadata: Mapping[str, Any]
    """Checked metadata, with default values for missing fields."""


def find_clips(inputs: Sequence[str]) -> list[Path]:
    """Return the paths of the finished clips that the user names, without duplicates.

    Args:
        inputs: Paths of clips or of folders with clips.

    Returns:
        Path of each clip's JSON, or of the clip's file if there is no JSON. Empty if the inputs are
        images.

    Raises:
        RequestError: Some inputs are clips and others are not.
        InputError: The inputs are only a run's manifest or table of clips, or a folder cannot be
            read.
    """
    found, images = list[Path](), list[Path]()
    for path in map(Path, inputs):
        # A pattern such as out/* also matches run.json and the run's table of clips, which are
        # skipped.
        if _is_of_run(path):
            continue
        if _has_frames_json(path):
            found.append(_preferred_path(path))
        elif os.path.isdir(path) and not _is_frames_folder(path):
            clips = _clips_in(path)
            found += map(_preferred_path, clips)
            images += [] if clips else [path]
        # A name with such a suffix counts as a clip even if the file is missing; reading it then
        # raises an error that says so.
        elif path.suffix in (".json", ".mp4") or _is_clip(path):
            found.append(_preferred_path(path))
        else:
            images.append(path)
    if images and found:
        raise RequestError(
            f"{str(found[0])!r} is a finished clip, but {str(images[0])!r} is not: finished clips "
            "and images are verified in different ways",
            "verify finished clips and images in two commands",
            details={"clip": str(found[0]), "other": str(images[0])},
        )
    if inputs and not (images or found):
        message = f"{inputs[0]!r} is a run's manifest or table of clips, not a clip"
        raise InputError(message, details={"path": inputs[0]})
    return list(dict.fromkeys(found))


def read_clip(path: Path) -> ClipOnDisk:
    """Read the metadata of a finished clip from its JSON, or from its file.

    Args:
        path: Path of the clip's JSON, or of the clip's file, which contains the metadata.

    Raises:
        InputError: The file does not exist, or does not contain metadata of a clip.
    """
    if path.suffix == ".json":
        return _read_clip_json(path)
    if not os.path.exists(path):
        raise InputError(f"{str(path)!r} does not exist", details={"path": str(path)})
    raw = video.read_metadata(path)
    metadata = check_clip_metadata(raw, f"the metadata in {str(path)!r} is not a clip's")
    return ClipOnDisk(path=path, json_path=None, raw=raw, metadata=metadata)


def find_input_file(clip: ClipOnDisk, image: Path | None, name: str = "") -> Path:
    """Find an input file of a finished clip, by the recorded SHA-256.

    Args:
        clip: Finished clip.
        image: Path that the user gave: the clip's first image, or a folder that has all inputs of
            the clip. None: search at the recorded path, and then in the clip's folder. If
            `image` is the first image and `name` is another input, the search is that for None.
        name: Name of the input: `last_image`, or the name of a reference image or of an additional
            video; "": the clip's first image.

    Raises:
        InputError: No file in these places has the recorded SHA-256.
    """
    metadata, folder = clip.metadata, clip.path.parent
    suffixes: tuple[str, ...] = IMAGE_SUFFIXES
    if name:
        if name == LAST_IMAGE:
            wanted, path = metadata["last_image_sha256"], metadata.get("last_image") or name
        elif name in (names := reference_names(len(metadata.get("references_sha256", ())))):
            place, paths = names.index(name), metadata.get("references", ())
            wanted = metadata["references_sha256"][place]
            path = paths[place] if place < len(paths) else name
        else:
            wanted, path = metadata["videos_sha256"][name], metadata["videos"].get(name, name)
            suffixes += VIDEO_SUFFIXES
        hint = "use `image` FOLDER, a folder with all inputs of the clip"
        if image is not None and not os.path.isdir(image):
            # The parameter `image` gives the path of the clip's first image only. Its other inputs
            # are searched for at their recorded paths and in the clip's folder.
            image = None
    else:
        wanted, path = metadata["input_sha256"], metadata["input"]
        hint = "use `image` PATH, the path of the file"
    recorded = located_path(path, folder)
    if image is None:
        candidates = [recorded, folder / recorded.name, *_files_in(folder, suffixes)]
    else:
        candidates = [*_files_in(image, suffixes)] if os.path.isdir(image) else [image]
    for found in dict.fromkeys(candidates):
        with contextlib.suppress(InputError):  # InputError: the path is missing, or is not a file
            if hashlib.sha256(read_bytes(found)).hexdigest() == wanted:
                return found
    where = str(recorded if image is None else image)
    raise InputError(
        f"the {name or 'image'} of {clip.path.name!r} is not at {where!r}",
        f"{hint}; the sha256 of the file is {wanted}",
        details={"clip": str(clip.path), "path": where, "sha256": wanted},
    )


def _read_clip_json(path: Path) -> ClipOnDisk:
    raw = parse_clip_json(path)
    metadata = check_clip_metadata(raw, f"{str(path)!r} is not a clip's JSON")
    # The clip's file is found by the name of the JSON file (x.mp4.json describes x.mp4), not by the
    # name in the JSON's content, so that it is found even after both files were renamed. Up to
    # svdpp 0.3, the JSON's name was x.json, so for such files the name in the content is used.
    named, suffix = path.with_suffix(""), video.FORMAT_SUFFIXES[metadata["format"]]
    is_named = named.suffix == suffix if suffix else named.exists()
    file = named if is_named else path.with_name(metadata["output"])
    return ClipOnDisk(path=file, json_path=path, raw=raw, metadata=metadata)


def _is_of_run(path: Path) -> bool:
    """Whether a path has the name of a run's manifest or of a run's table of clips."""
    names = MANIFEST, CLIP_TABLE
    return path.name in names or path.name.endswith(tuple(f".{name}" for name in names))


def _is_clip(path: Path) -> bool:
    """Whether a path is a clip's file with metadata, or a clip's JSON, which may be damaged."""
    try:
        if path.suffix != ".json":
            is_video = path.suffix in _VIDEOS or _is_frames_folder(path)
            return is_video and "latents_sha256" in video.read_metadata(path)
        named = path.with_suffix("")
        if named.suffix in _VIDEOS or _is_frames_folder(named):
            return True
        return b'"latents_sha256"' in read_small_file(path, "clip's JSON")
    except InputError:
        return False


def _clips_in(folder: Path) -> list[Path]:
    try:
        names = sorted(folder.iterdir())
    except OSError as error:
        details = {"path": str(folder), "reason": error.strerror}
        message = f"{str(folder)!r} cannot be read: {error.strerror}"
        raise InputError(message, details=details) from error
    return [path for path in names if not _is_of_run(path) and _is_clip(path)]


def _preferred_path(path: Path) -> Path:
    """Return the path of a clip's JSON if it exists, otherwise the path of its file.

    A clip whose file and JSON are both named by the user thus counts only once.
    """
    if path.suffix == ".json":
        return path
    json_path = path.with_name(f"{path.name}.json")
    if json_path.exists():
        return json_path
    old_path = path.with_suffix(".json")  # name of the JSON up to svdpp 0.3
    with contextlib.suppress(InputError):
        if old_path.exists() and _read_clip_json(old_path).path == path:
            return old_path
    return path


def _is_frames_folder(path: Path) -> bool:
    # `os.path.isfile` is used, because `Path.is_file` raises an error if a name is too long
    return os.path.isfile(path / _FIRST_FRAME)


def _has_frames_json(path: Path) -> bool:
    """Whether a path is a folder of a clip's frames, according to the JSON beside the folder."""
    if not (path.name and os.path.isdir(path)):
        return False
    with contextlib.suppress(InputError):
        metadata = parse_clip_json(path.with_name(f"{path.name}.json"))
        return bool(metadata.get("format") == "frames")
    return False


def _files_in(folder: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    names = sorted(folder.iterdir()) if os.path.isdir(folder) else []
    yield from (path for path in names if path.suffix.lower() in suffixes)


# Smallest PSNR, in dB, at which two encodings count as the same clip. There is a limit for the
# whole clip, for each frame, and for each block of a frame. Encodings of one clip by different
# versions of an encoder are above 40 dB at every --crf up to 30, and different videos are far below
# 30 dB. Limits for frames and blocks are needed because one altered frame, or a logo, hardly lowers
# the PSNR of the clip. These limits leave room for other encoder settings: if encodings by two x264
# presets are above 30 dB in the whole clip, they are also above 28 dB in each frame and above 27 dB
# in each block.
_SIMILAR_DB = 30.0
_SIMILAR_FRAME_DB = 25.0
_SIMILAR_BLOCK_DB = 20.0
# Side of a block in pixels.
_BLOCK = 32
# Two sounds count as similar if the mean square of their difference is at most this fraction of the
# mean square of the recomputed sound.
_SIMILAR_SOUND = 0.01


@dataclass(frozen=True, kw_only=True)
class ClipCheck:
    """Result of the check of one part of a finished clip: latent, frames, sound or file."""

    what: Literal["latent", "frames", "audio", "file"]
    equal: bool | None
    """Whether the check passes. None: unknown. Only a latent's check can be unknown: its hash
    differs, and the latent itself is not stored, so only the clip's frames could be compared."""
    recorded: str | None
    """SHA-256, in hex, from the metadata; None if the metadata do not have the hash."""
    found: str | None
    """SHA-256, in hex, of the recomputed tensor, or of the clip's file; None if the file is
    missing."""
    detail: str = ""
    """Faults that the check has found, in words. Without faults, a remark on the comparison."""
    within: bool = False
    """Whether the check passes because of the tolerance, although bits differ."""
    max_abs_diff: float | None = None
    """Largest absolute difference from the reference; for frames and audio, as a fraction of the
    highest level (255 or 32767). None if the bits are equal, or if only hashes were compared."""
    max_ulp: int | None = None
    """Largest difference in ULPs of the dtype; for frames and audio, in levels (of 255 or 32767).
    None if the bits are equal, or if only hashes were compared."""

    @property
    def verdict(self) -> str:
        """Result of a clip's check: `bitwise equal`, `within tolerance`, `different` or `unknown`.

        A missing file is `different`.
        """
        if self.equal is None:
            return "unknown"
        if not self.equal:
            return "different"
        return "within tolerance" if self.within else "bitwise equal"


def check_file(
    clip: ClipOnDisk, frames: Frames, sound: video.AudioSamples | None = None
) -> ClipCheck:
    """Compare a finished clip's file, which may be missing, with metadata and recomputed frames.

    PNG files are lossless, so the hash of their pixels must equal the recorded hash. Other formats
    are lossy. For these, the recomputed frames are encoded to a second file, and the two files are
    compared: pixels, sound, and properties that affect how players show the clip.

    Args:
        clip: Finished clip.
        frames: Recomputed frames, uint8 of shape (F, H, W, 3).
        sound: Recomputed samples, int16 of shape (N, channels), and their rate; None for a silent
            clip.
    """
    recorded, found = clip.metadata["file_sha256"], None
    if not os.path.exists(clip.path):
        missing = f"there is no {clip.path.name!r}"
        return ClipCheck(what="file", equal=False, recorded=recorded, found=None, detail=missing)
    faults, shown, is_frames = list[str](), "", clip.metadata["format"] == "frames"
    try:
        difference = video.folder_difference(clip.path, len(frames)) if is_frames else None
        if difference is not None:
            faults += difference.faults
        if difference is None or not difference.has_folders:
            found = video.clip_sha256(clip.path)
        if found is not None and recorded not in (None, found):
            changed = "the file's sha256 is not the recorded one: the file was changed or replaced"
            faults.insert(0, changed)
        if difference is None:
            faults += _metadata_faults(clip)
            shown, wrong = _compare_lossy(clip, frames, sound)
            faults += wrong
        elif not (difference.missing or difference.surplus):
            faults += _metadata_faults(clip)
            shown, wrong = _compare_lossless(clip)
            faults += wrong
    except InputError as error:
        faults, shown = [*faults, str(error)], ""
    if recorded is None:
        shown += "; no sha256 of the file is recorded"
    detail = "; ".join(faults) if faults else shown
    return ClipCheck(what="file", equal=not faults, recorded=recorded, found=found, detail=detail)


def _metadata_faults(clip: ClipOnDisk) -> Iterator[str]:
    if clip.json_path is None:
        return
    inside, beside = video.read_metadata(clip.path), embedded_part(clip.raw)
    different = (name for name in (*beside, *inside) if inside.get(name) != beside.get(name))
    if (name := next(different, None)) is not None:
        inside_says, beside_says = (short_repr(values.get(name)) for values in (inside, beside))
        yield f"the metadata in the file says {name} {inside_says}, the JSON says {beside_says}"


def _compare_lossless(clip: ClipOnDisk) -> tuple[str, list[str]]:
    pixels = video.read_frames(clip.path, "frames")
    faults = video.folder_faults(clip.path)
    if video.frames_sha256(pixels) == clip.metadata["frames_sha256"]:
        return "lossless: the pixels are the recorded frames, bit for bit", faults
    return "", ["the pixels are not the recorded frames", *faults]


def _compare_lossy(
    clip: ClipOnDisk, frames: Frames, sound: video.AudioSamples | None
) -> tuple[str, list[str]]:
    metadata, faults = clip.metadata, list[str]()
    kind = metadata["format"]
    with temp_folder("svdpp-verify-") as folder:
        again = folder / f"again{video.FORMAT_SUFFIXES[kind]}"
        encoding = {name: metadata[name] for name in ENCODING_FIELDS}
        output = OutputConfig(path=str(again), **encoding)
        video.write_clip(frames, output, fps=metadata["fps"], metadata={}, audio=sound)
        ours, theirs = (video.read_frames(path, kind) for path in (clip.path, again))
        if kind == "mp4" and sound is not None and not _sound_alike(clip.path, again):
            faults.append("the sound is not that of the recomputed samples")
        faults += video.presentation_differences(clip.path, again, kind)
    if ours.shape != theirs.shape:
        sizes = f"{_describe_size(ours)} instead of {_describe_size(theirs)}"
        return "", [*faults, f"the file has {sizes}"]
    distance = _measure_distance(ours, theirs)
    shown = f"{kind} is lossy: pixels compared with those of the recomputed frames, encoded here"
    shown = f"{shown}: {distance.text}"
    return shown, faults if distance.is_similar else [*faults, shown]


def _sound_alike(one: Path, other: Path) -> bool:
    (ours, _), (theirs, _) = video.read_audio(one), video.read_audio(other)
    if len(ours) != len(theirs):
        return False
    allowed = _SIMILAR_SOUND * np.square(theirs, dtype=float).mean()
    return bool(np.square(ours - theirs.astype(float)).mean() <= allowed)


@dataclass(frozen=True, kw_only=True)
class _Distance:
    """Measures of the difference between the pixels of two videos."""

    psnr_db: float
    """PSNR of all frames together, in dB."""
    frame_db: float
    """PSNR of the worst frame, in dB."""
    block_db: float
    """PSNR of the worst block of `_BLOCK` x `_BLOCK` pixels of a frame, in dB."""
    levels: int
    """Largest difference of a pixel, in 8-bit levels."""

    @property
    def is_similar(self) -> bool:
        return (
            self.psnr_db >= _SIMILAR_DB
            and self.frame_db >= _SIMILAR_FRAME_DB
            and self.block_db >= _SIMILAR_BLOCK_DB
        )

    @property
    def text(self) -> str:
        if not self.levels:
            return "every pixel equal"
        noun = "level" if self.levels == 1 else "levels"
        text = f"{self.psnr_db:.1f} dB, {self.levels} {noun} at most"
        if self.is_similar or self.psnr_db < _SIMILAR_DB:
            return text
        if self.frame_db < _SIMILAR_FRAME_DB:
            return f"{text}, but {self.frame_db:.1f} dB in one frame"
        return f"{text}, but {self.block_db:.1f} dB in {_BLOCK}x{_BLOCK} pixels of one frame"


def _measure_distance(ours: Frames, theirs: Frames) -> _Distance:
    _, height, width, _ = ours.shape
    rows, columns = np.arange(0, height, _BLOCK), np.arange(0, width, _BLOCK)
    sizes = np.outer(np.diff(rows, append=height), np.diff(columns, append=width))
    errors, worst_block, largest = list[float](), 0.0, 0
    # Frames are compared one at a time to save memory: as int16, a clip takes twice the memory.
    for one, other in zip(ours, theirs, strict=True):
        difference = one.astype(np.int16) - other
        squares = np.square(difference, dtype=np.int32).mean(axis=2)
        blocks = np.add.reduceat(np.add.reduceat(squares, rows, axis=0), columns, axis=1) / sizes
        errors.append(float(squares.mean()))
        worst_block = max(worst_block, float(blocks.max()))
        largest = max(largest, int(np.abs(difference).max()))
    return _Distance(
        psnr_db=_decibels(sum(errors) / len(errors)),
        frame_db=_decibels(max(errors)),
        block_db=_decibels(worst_block),
        levels=largest,
    )


def _decibels(square: float) -> float:
    return 10 * math.log10(255**2 / square) if square else math.inf


def _describe_size(frames: Frames) -> str:
    count, height, width, _ = frames.shape
    return f"{pluralize(count, 'frame')} of {width}x{height}"
