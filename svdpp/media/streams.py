"""Streams of a video file, parsed from ffmpeg's log: kind, codec, pixel aspect, rotation, times."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

from svdpp.media.ffmpeg import MediaFailure, mp4_source, probe_log, run_ffmpeg

_SECONDS = 600.0
# Maximum bytes of ffmpeg's list of packets, enough for a million packets. The limit is needed
# because a malicious file can have any number of empty packets.
_MAX_LISTING = 48 * 2**20

# Line about a stream in ffmpeg's log, such as
# `  Stream #0:1[0x2](und): Video: h264 (High) (avc1 / 0x31637661), ..., 12288 tbn (default)`.
# A file's metadata cannot imitate such a line, because ffmpeg indents metadata deeper.
_STREAM = re.compile(r"^  Stream #0:(\d+)(?:\[\w+\])?(?:\([^)]*\))?: (\w+): ([^\s,]+)(.*)$")
_MATRIX = re.compile(r"^ +display ?matrix: (.+)$", re.IGNORECASE)
_HEADER = re.compile(r"^#(tb|sar) (\d+): (\d+)/(\d+)$")
_PACKET = re.compile(r"^(\d+), +(-?\d+), +(-?\d+), +(\d+),")
# Pattern for a frame's interlacing and colour properties in the log of ffmpeg's filter `showinfo`.
_FRAME_LOOK = re.compile(r"(\bi:\w|\bcolor_range:\w+ color_space.*)")
# If the first packet of a file is shown at most this many seconds after 0, the file counts as
# beginning at 0. Encoders with B-frames delay the first frame a little, and some muxers write no
# edit list, which would tell players to skip the delay.
_UNSEEN_SECONDS = Fraction(1, 2)
# Codecs of single images. In a file with a real video, a stream with one of these codecs is a cover
# image.
_STILLS = {"mjpeg", "png", "bmp", "gif", "webp", "tiff"}


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One stream of a video file, with the properties that affect how players show it."""

    index: int
    """Number of the stream in the file, from 0."""
    kind: str
    """`video`, `audio`, `subtitle`, `data` or `attachment`."""
    codec: str
    """ffmpeg's name of the codec, such as `h264`; `none` if it is unknown."""
    is_default: bool = False
    """Whether players choose this stream among the streams of the same kind."""
    is_cover: bool = False
    """Whether the stream is a cover image (attached picture)."""
    rotation: str = ""
    """Rotation or mirroring that players apply, as ffmpeg prints it; empty: none."""
    pixel_aspect: Fraction = Fraction(1)
    """Width of a pixel divided by its height."""
    times: tuple[Fraction, ...] = field(default=(), repr=False)
    """Presentation times of the packets in seconds, ascending; empty if they were not read."""
    end: Fraction = Fraction(0)
    """End of the last packet, in seconds."""

    @property
    def seconds(self) -> float:
        """Duration of the stream in seconds, by its packets' times; 0 if they were not read."""
        return float(self.end - self.times[0]) if self.times else 0.0


def probe_streams(
    source: Sequence[str], files: tuple[int, ...] = (), *, seconds: float = _SECONDS
) -> list[Stream]:
    """Return the streams that a media file's header lists, without the times of their packets.

    Args:
        source: Options of ffmpeg for the input, up to its `-i NAME`.
        files: Open file descriptors that ffmpeg inherits.
        seconds: Seconds after which ffmpeg is killed.

    Returns:
        The streams; an empty list if the file has no header that can be read.

    Raises:
        MediaFailure: ffmpeg did not end in time.
    """
    return list(_parse_log(probe_log(source, seconds=seconds, files=files)))


def main_video(streams: Sequence[Stream]) -> Stream | None:
    """Return the first video stream that is not a cover image; None if there is none.

    Streams that are marked as covers, and single images beside a moving video, are cover images.
    """
    videos = [each for each in streams if each.kind == "video" and not each.is_cover]
    if not videos:
        return None
    moving = [each for each in videos if each.codec not in _STILLS]
    return moving[0] if moving else videos[0]


def read_streams(path: Path) -> list[Stream]:
    """Return all streams of an mp4, with the times of their packets.

    Raises:
        MediaFailure: The file cannot be read, or has too many packets.
    """
    # Without -copyts, ffmpeg would subtract the time of the first packet. This time has to be
    # compared, because a player shows nothing before it.
    source = ["-copyts", *mp4_source(path)]
    streams = {each.index: each for each in probe_streams(source)}
    arguments = ["-map", "0", "-c", "copy", "-copy_unknown", "-fs", str(_MAX_LISTING)]
    listing = run_ffmpeg(
        [*source, *arguments, "-f", "framecrc", "pipe:1"], seconds=_SECONDS
    ).decode(errors="replace")
    if len(listing) >= _MAX_LISTING:
        raise MediaFailure("the file has too many packets")
    units, shown = dict[int, Fraction](), dict[int, list[tuple[Fraction, Fraction]]]()
    for line in listing.splitlines():
        if match := _HEADER.match(line):
            name, index, above, below = match[1], int(match[2]), int(match[3]), int(match[4])
            if name == "tb":
                units[index] = Fraction(above, below)
            # A ratio of 0/1 means unknown; players then assume 1/1, which is the default here.
            elif above and below:
                streams[index] = replace(streams[index], pixel_aspect=Fraction(above, below))
        elif match := _PACKET.match(line):
            index, unit = int(match[1]), units[int(match[1])]
            begun = int(match[3]) * unit
            shown.setdefault(index, []).append((begun, begun + int(match[4]) * unit))
    first = min((begun for spans in shown.values() for begun, _ in spans), default=Fraction(0))
    offset = first if 0 < first <= _UNSEEN_SECONDS else 0
    for index, spans in shown.items():
        times = tuple(sorted(begun - offset for begun, _ in spans))
        end = max(end for _, end in spans) - offset
        streams[index] = replace(streams[index], times=times, end=end)
    return list(streams.values())


def read_colours(path: Path) -> set[str]:
    """Return colour range, matrix, primaries, transfer and field order of the frames of an mp4.

    The values come from the H.264 stream. The container's box `colr` may have other values.

    Args:
        path: Path of an mp4 that does not exceed the limits of a clip.

    Raises:
        MediaFailure: ffmpeg did not end in time.
    """
    # The frames' side data are deleted, because they could fill the log.
    filters = "sidedata=mode=delete,showinfo=checksum=0"
    output = ["-map", "0:v:0", "-nostats", "-vf", filters, "-f", "null", "-"]
    return set(_FRAME_LOOK.findall(probe_log([*mp4_source(path), *output], seconds=_SECONDS)))


# Two times of frames count as equal if they differ by at most this many seconds. A tolerance is
# needed because versions of ffmpeg round times differently.
_SAME_SECONDS = 2e-3
# The same tolerance for times of sound. It is larger, because audio encoders add silence at the
# beginning and at the end.
_SAME_SOUND_SECONDS = 0.1


def stream_differences(ours: Sequence[Stream], theirs: Sequence[Stream]) -> Iterator[str]:
    """Compare the streams of two files; yield a clause for each difference that affects players.

    Args:
        ours: Streams of the file to check.
        theirs: Streams of the reference file.
    """
    kinds, expected = (" and ".join(each.kind for each in side) for side in (ours, theirs))
    if kinds != expected:
        yield f"its streams are {kinds or 'none'} instead of {expected}"
        return
    for our, their in zip(ours, theirs, strict=True):
        what = "sound" if our.kind == "audio" else our.kind
        for name, one, other in (
            ("codec", our.codec, their.codec),
            ("pixel aspect", str(our.pixel_aspect), str(their.pixel_aspect)),
            ("rotation", our.rotation or "none", their.rotation or "none"),
            ("mark as default", str(our.is_default), str(their.is_default)),
        ):
            if one != other:
                yield f"the {name} of its {what} is {one} instead of {other}"
        yield from _time_differences(what, our, their)


def _time_differences(what: str, ours: Stream, theirs: Stream) -> Iterator[str]:
    """Yield a clause for each difference of two streams in duration or times.

    Args:
        what: Kind of the streams, as the clauses name it, such as `sound`.
        ours: Stream of the file to check.
        theirs: Stream of the reference file.
    """
    same = _SAME_SOUND_SECONDS if what == "sound" else _SAME_SECONDS
    if abs(ours.seconds - theirs.seconds) > same:
        with_rate = what == "video"
        found, expected = _duration(ours, with_rate), _duration(theirs, with_rate)
        yield f"its {what} lasts {found} instead of {expected}"
    elif len(ours.times) == len(theirs.times) and what == "video":
        pairs = zip(ours.times, theirs.times, strict=True)
        shifts = [float(one - other) for one, other in pairs]
        if max(map(abs, shifts)) > same:
            yield f"its frames are shifted in time by up to {max(shifts, key=abs):.3g} s"
    elif ours.times and theirs.times and abs(ours.times[0] - theirs.times[0]) > same:
        yield f"its {what} begins at {float(ours.times[0]):.3g} s"


def _duration(stream: Stream, with_rate: bool) -> str:
    text = f"{stream.seconds:.4g} s"
    if with_rate and stream.seconds:
        text += f" ({len(stream.times) / stream.seconds:.4g} frames a second)"
    return text


def _parse_log(log: str) -> Iterator[Stream]:
    stream = None
    for line in log.splitlines():
        if line.startswith(("Stream mapping:", "Output #")):
            break
        if match := _STREAM.match(line):
            if stream is not None:
                yield stream
            rest = match[4]
            stream = Stream(
                index=int(match[1]),
                kind=match[2].lower(),
                codec=match[3],
                is_default="(default)" in rest,
                is_cover="(attached pic)" in rest,
            )
        elif stream is not None and (match := _MATRIX.match(line)):
            stream = replace(stream, rotation=match[1])
    if stream is not None:
        yield stream
