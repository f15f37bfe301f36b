"""Check of boxes in an mp4 that players obey but ffmpeg ignores, such as a box with a crop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from svdpp.media.ffmpeg import MediaFailure

# Boxes in a video's sample entry (the description of its codec) that are not compared here: they do
# not affect players, or `stream_differences` compares their effect.
_HARMLESS = {"avcC", "btrt", "fiel", "free", "pasp", "colr"}
_PATH = ("moov", "trak", "mdia", "minf", "stbl", "stsd")
# Numbers of bytes of fixed fields: those before the boxes in a video's sample entry, and those
# before the sample entries in the box `stsd`.
_ENTRY_FIELDS, _STSD_FIELDS = 78, 8
_MAX_COLOURS = 2**20
_MAX_BOXES = 10_000


def sample_entry_faults(ours: Path, theirs: Path) -> Iterator[str]:
    """Find boxes of an mp4 that change how players show it; yield a clause for each fault.

    The reference is an mp4 of the same clip, which svdpp has computed again for the check. A fault
    is a box that the reference lacks, or a `colr` box (colours) whose content differs from the
    reference's.

    Args:
        ours: Path of the mp4 to check.
        theirs: Path of the mp4 of the recomputed clip.

    Yields:
        Clause for a message, such as "its video has these further boxes: clap".

    Raises:
        OSError: A file cannot be read.
        MediaFailure: The boxes of a file are damaged or too many.
    """
    (our_boxes, our_colours), (their_boxes, their_colours) = map(_sample_entry, (ours, theirs))
    if further := sorted(our_boxes - their_boxes - _HARMLESS):
        yield f"its video has these further boxes: {', '.join(further)}"
    if our_colours and our_colours != their_colours:
        yield "the colours of its container are not those of the recomputed clip"


def _sample_entry(path: Path) -> tuple[set[str], set[bytes]]:
    """Return the kinds of boxes in an mp4's sample entries, and the contents of `colr` boxes."""
    kinds, colours = set[str](), set[bytes]()
    with path.open("rb") as file:
        file.seek(0, 2)
        for begin, end in _find(file, 0, file.tell(), _PATH):
            for entry, start, stop in _boxes(file, begin + _STSD_FIELDS, end):
                # Other codecs are skipped, because `stream_differences` reports them.
                if entry not in ("avc1", "avc3"):
                    continue
                for kind, first, last in _boxes(file, start + _ENTRY_FIELDS, stop):
                    kinds.add(kind)
                    if kind == "colr":
                        file.seek(first)
                        colours.add(file.read(min(last - first, _MAX_COLOURS)))
    return kinds, colours


def _find(file: BinaryIO, begin: int, end: int, path: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    for kind, start, stop in _boxes(file, begin, end):
        if kind == path[0]:
            if len(path) == 1:
                yield start, stop
            else:
                yield from _find(file, start, stop, path[1:])


def _boxes(file: BinaryIO, begin: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Yield kind, begin and end of the content of each mp4 box between two offsets of a file."""
    for _ in range(_MAX_BOXES):
        if end - begin < 8:
            return
        file.seek(begin)
        header = file.read(16)
        size, start = int.from_bytes(header[:4]), begin + 8
        if size == 1:
            size, start = int.from_bytes(header[8:16]), begin + 16
        stop = end if size == 0 else begin + size
        if not start <= stop <= end:
            return  # the remaining bytes are not a whole box
        yield header[4:8].decode("latin-1"), start, stop
        begin = stop
    raise MediaFailure("the mp4 has too many boxes")
