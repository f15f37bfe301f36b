"""Clips on disk: frames, sound and metadata, written and read by ffmpeg and Pillow.

Frames are numpy uint8, shape (F, H, W, 3), RGB.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageSequence, PngImagePlugin

from svdpp.config import OutputConfig, VideoFormat
from svdpp.config.limits import MAX_CLIP_PIXELS, MAX_FRAMES
from svdpp.errors import InputError, SvdppError, without_controls
from svdpp.media.ffmpeg import EXACT_SCALE, MediaFailure, decode_frames, mp4_source, run_ffmpeg
from svdpp.media.mp4_boxes import sample_entry_faults
from svdpp.media.output_files import atomic_output, check_replaceable, error_reason, fsync
from svdpp.media.streams import read_colours, read_streams, stream_differences

Frames = npt.NDArray[np.uint8]

#: Sound of a clip: samples of shape (N, channels), and the sample rate in Hz.
AudioSamples = tuple[npt.NDArray[np.int16], int]

FORMAT_SUFFIXES: Mapping[VideoFormat, str] = {
    "mp4": ".mp4",
    "gif": ".gif",
    "webp": ".webp",
    "frames": "",
}
#: Largest length of a clip's file name, in bytes. Most file systems allow 255, but suffixes such as
#: `.json` are appended to the name.
MAX_NAME_BYTES = 200

# Nominal frame rates of television. NTSC multiplies them by 1000/1001.
_NTSC = (24, 30, 48, 60, 120, 240)
_KEY = "svdpp"
# Pattern of an entry in an ffmetadata file. An entry ends at a line break without a backslash; line
# breaks in its value have a backslash before them.
_ENTRY = re.compile(r"(?:[^\\\n]|\\.)+", re.DOTALL)
_FRAME_NAME = re.compile(r"\d{5,}\.png")
_SHOWN_NAMES = 3
_READ_SECONDS = 600.0
_WRITE_SECONDS = 60.0  # limit for an encode; each frame adds one second
_BT709 = "setparams=range=tv:colorspace=bt709:color_primaries=bt709:color_trc=bt709"
_AAC_BLOCK = 1024  # samples in one block of AAC


def write_clip(
    frames: Frames,
    output: OutputConfig,
    *,
    fps: float,
    metadata: Mapping[str, object],
    audio: AudioSamples | None = None,
) -> str:
    """Write a clip to a file or folder, and read it back as a check; completely or not at all.

    The clip is written under a temporary name, and renamed after the check.

    - `mp4` is H.264, yuv420p, bt709, with `audio` as AAC.
    - `gif` and `webp` loop forever. gif stores times in 1/100 s, and at most 50 frames per second.
    - `frames` is a folder of 00000.png and so on. An existing folder is replaced only if all of
      its files have such names.

    Args:
        frames: Frames, uint8 of shape (F, H, W, 3), RGB.
        output: Path, format and quality.
        fps: Frames per second; an mp4 has the rate that `frame_rate` returns.
        metadata: JSON values by name, which the clip stores and `read_metadata` returns.
        audio: Samples, int16 of shape (N, channels), and the sample rate in Hz; None: no sound.
            Formats other than mp4 ignore the sound.

    Returns:
        SHA-256 of the written clip, as `clip_sha256` returns it.

    Raises:
        OutputError: The clip cannot be written, or differs when it is read back.
    """
    frames = _checked(frames)
    text = json.dumps(dict(metadata), allow_nan=False)
    files = _FRAME_NAME if output.format == "frames" else None
    suffix = FORMAT_SUFFIXES[output.format]
    with atomic_output(output.path, suffix, files) as temporary:
        if output.format == "mp4":
            _encode_mp4(temporary, frames, fps, output.crf, text, audio)
        elif output.format == "frames":
            _write_folder(temporary, frames, text)
        else:
            temporary.write_bytes(_encode_animation(frames, output.format, fps, text))
        _check_whole(temporary, output.format, frames, fps)
        if output.format == "mp4" and audio is not None:
            _check_audio(temporary, audio)
        if read_metadata(temporary) != json.loads(text):
            raise MediaFailure(
                "the metadata read back from the clip differ from the written metadata"
            )
        return clip_sha256(temporary)


def frame_rate(fps: float) -> Fraction:
    """Return the exact frame rate that an mp4 gets for `fps`, as a fraction, such as 30000/1001.

    The rates of NTSC are recognised by their decimals: 23.976 (or 23.98) means 24000/1001, 29.97
    means 30000/1001, 59.94 means 60000/1001. Other rates are rounded to a fraction with a
    denominator of at most 1000.

    Args:
        fps: Frames per second.
    """
    for whole in _NTSC:
        ntsc = Fraction(1000 * whole, 1001)
        if fps in (round(float(ntsc), 2), round(float(ntsc), 3), float(ntsc)):
            return ntsc
    return Fraction(fps).limit_denominator(1000)


def check_output(output: OutputConfig) -> None:
    """Raise an `OutputError` if `write_clip` may not replace what exists at the output's path.

    Raises:
        OutputError: The path exists and cannot be replaced.
    """
    check_replaceable(output.path, _FRAME_NAME if output.format == "frames" else None)


def read_frames(path: Path, format: VideoFormat) -> Frames:
    """Return every frame of a stored clip, uint8 of shape (F, H, W, 3).

    gif and webp store successive equal frames as one longer frame. Each stored frame is repeated
    by its duration, divided by the greatest common divisor of all durations: stored frames of 100
    and 300 ms give one and three frames.

    Raises:
        InputError: The file is damaged, has another format, or exceeds the limits of a clip.
    """
    with _reading(path, format):
        if format == "mp4":
            return _stack_frames(decode_frames(mp4_source(path), seconds=_READ_SECONDS))
        if format == "frames":
            paths = (each for each in sorted(path.iterdir()) if _FRAME_NAME.fullmatch(each.name))
            return _stack_frames(Image.open(each, formats=["PNG"]) for each in paths)
        images, times = _read_animation(path, format)
        unit = math.gcd(*times) or 1
        counts = [max(1, time // unit) for time in times]
        _check_clip_size(sum(counts), *images.shape[1:3])
        return np.repeat(images, counts, axis=0)


def presentation_differences(ours: Path, theirs: Path, format: VideoFormat) -> list[str]:
    """Compare how players show two clips with the same pixels; return a clause for each difference.

    Pixels and sound samples are not compared here. For an mp4, the number of streams is compared,
    and of each stream its kind, codec, pixel aspect, colours, rotation and times, and whether it is
    a default stream. For a gif or webp, the durations of frames, number of repetitions,
    orientation, transparency, and data beside the frames are compared.

    Args:
        ours: File to check.
        theirs: Reference file.
        format: Format of both files.

    Returns:
        A clause for each difference, such as "its repetition is once instead of endless".

    Raises:
        InputError: A file cannot be read.
    """
    if format == "mp4":
        with _reading(ours, format):
            differences = list(stream_differences(*map(read_streams, (ours, theirs))))
            differences += sample_entry_faults(ours, theirs)
            one, other = map(read_colours, (ours, theirs))
        if one != other:
            differences.append(f"its frames have {_words(one)} instead of {_words(other)}")
        return differences
    with _reading(ours, format):
        our_facts, their_facts = (_animation_facts(path, format) for path in (ours, theirs))
    return [
        f"its {name} is {our_facts[name]} instead of {their_facts[name]}"
        for name in our_facts
        if our_facts[name] != their_facts[name]
    ]


def _words(colours: set[str]) -> str:
    return ", ".join(sorted(colours)) or "no colours"


def _animation_facts(path: Path, format: VideoFormat) -> dict[str, object]:
    """Return the properties that change how players show a gif or webp, by name."""
    _, times = _read_animation(path, format)
    with Image.open(path, formats=[format]) as image:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        transparent = any(map(_is_transparent, ImageSequence.Iterator(image)))
    with Image.open(path, formats=[format]) as image:
        extras = {"icc_profile", "xmp", "transparency"} & image.info.keys()
        loop = {0: "endless", None: "once"}.get(image.info.get("loop"), "limited")
    return {
        "duration": f"{sum(times)} ms",
        "repetition": loop,
        "orientation": orientation,
        "transparency": "some" if transparent else "none",
        "further content": ", ".join(sorted(extras)) or "none",
    }


def folder_faults(folder: Path) -> list[str]:
    """Find metadata in a clip's PNG files that make viewers show other pixels than those stored.

    Returns:
        A clause for each kind of such metadata, with the name of the first file that has it.

    Raises:
        InputError: A PNG file cannot be read.
    """
    with _reading(folder, "frames"):
        names = sorted(each.name for each in folder.iterdir() if _FRAME_NAME.fullmatch(each.name))
        faults = dict[str, str]()  # for each fault, the name of the first file that has it
        for name in names:
            with Image.open(folder / name, formats=["PNG"]) as image:
                for fault in _png_faults(image):
                    faults.setdefault(fault, name)
    return [f"{name} {fault}" for fault, name in faults.items()]


@dataclass(frozen=True, kw_only=True)
class FolderDifference:
    """Difference between the entries of a folder and the PNG files that a clip needs, by name."""

    missing: tuple[str, ...]
    """Names of frames that are missing in the folder, or are not regular files."""
    surplus: tuple[str, ...]
    """Names of frames beyond the clip's last frame, sorted."""
    others: tuple[str, ...]
    """Names of entries that are not frames: files, and folders (with `/` after their names)."""

    @property
    def has_folders(self) -> bool:
        """Whether the clip's folder has a subfolder; if so, `clip_sha256` cannot hash the clip."""
        return any(name.endswith("/") for name in self.others)

    @property
    def faults(self) -> list[str]:
        """Clauses for an error message about a folder's missing, surplus and other entries.

        Empty if there are no such entries.
        """
        kinds = (
            ("it lacks", self.missing),
            ("it has frames after its last frame", self.surplus),
            ("it has entries that are not frames", self.others),
        )
        return [f"{words}: {_few(names)}" for words, names in kinds if names]


def folder_difference(folder: Path, num_frames: int) -> FolderDifference:
    """Return how the file names in a clip's folder differ from the names that `write_clip` uses.

    Args:
        folder: Folder of a clip.
        num_frames: Number of the clip's frames.

    Raises:
        InputError: The folder cannot be read.
    """
    with _reading(folder, "frames"):
        files = {each.name: each.is_file() for each in folder.iterdir()}
    expected = [f"{index:05d}.png" for index in range(num_frames)]
    missing = [name for name in expected if not files.get(name)]
    surplus, others = list[str](), list[str]()
    for name in sorted(files.keys() - set(expected)):
        is_frame = files[name] and _FRAME_NAME.fullmatch(name) is not None
        (surplus if is_frame else others).append(name if files[name] else f"{name}/")
    others += [f"{name}/" for name in missing if name in files]
    return FolderDifference(missing=tuple(missing), surplus=tuple(surplus), others=tuple(others))


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(without_controls(name) for name in names[:_SHOWN_NAMES])
    more = len(names) - _SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _png_faults(image: Image.Image) -> Iterator[str]:
    if getattr(image, "is_animated", False):
        yield "is animated"
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        yield "has an orientation by which viewers rotate or mirror it"
    if found := sorted({"icc_profile", "gamma", "chromaticity"} & image.info.keys()):
        yield f"has metadata by which viewers change its colours ({', '.join(found)})"
    across, down = image.info.get("aspect") or image.info.get("dpi") or (1, 1)
    if across != down:
        yield "has pixels that are not square"
    if _is_transparent(image):
        yield "is transparent"


def _is_transparent(image: Image.Image) -> bool:
    if not image.has_transparency_data:
        return False
    lowest, _ = image.convert("RGBA").getchannel("A").getextrema()
    return lowest != 255


def read_metadata(path: Path) -> dict[str, object]:
    """Return the `metadata` that `write_clip` stored inside a clip's file or folder.

    Raises:
        InputError: The clip has no metadata of svdpp, or cannot be read.
    """
    with _reading(path, "a clip"):
        record = json.loads(_metadata_text(path) or "null")
    if not isinstance(record, dict):
        raise InputError(f"{str(path)!r} has no metadata of svdpp", details={"path": str(path)})
    return record


def clip_sha256(path: Path) -> str:
    """Return the SHA-256 of a clip's file, or of the names and hashes of a folder's frame files.

    Raises:
        InputError: A file cannot be read, or is not a regular file.
    """
    with _reading(path, "a clip"):
        if not path.is_dir():
            return _sha256_of(path)
        lines = (f"{_sha256_of(file)}  {file.name}\n" for file in sorted(path.iterdir()))
        return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def _sha256_of(path: Path) -> str:
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise MediaFailure(f"{path.name!r} is not a regular file")
        return hashlib.file_digest(file, "sha256").hexdigest()


def frames_sha256(frames: Frames) -> str:
    """Return the SHA-256 of a clip's decoded frames, in C order.

    Args:
        frames: Frames, uint8 of shape (F, H, W, 3).

    Raises:
        ValueError: The array has another dtype or shape.
    """
    return hashlib.sha256(_checked(frames).data).hexdigest()


def _checked(frames: Frames) -> Frames:
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or not frames.size:
        raise ValueError(f"frames must be uint8 (F, H, W, 3), got {frames.dtype} {frames.shape}")
    return np.ascontiguousarray(frames)


@contextlib.contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Turn exceptions from reading a clip into an `InputError`; `what` is the expected format."""
    try:
        yield
    except SvdppError:
        raise
    except Exception as error:  # Pillow raises exceptions of nearly any type on damaged files
        details = {"path": str(path), "reason": error_reason(error)}
        message = f"{str(path)!r} cannot be read as {what}: {error_reason(error)}"
        raise InputError(message, details=details) from error


def _check_whole(path: Path, format: VideoFormat, frames: Frames, fps: float) -> None:
    """Raise a `MediaFailure` if a written clip lacks frames, which ffmpeg or disks can lose."""
    if format in ("mp4", "frames"):
        shape = read_frames(path, format).shape
    else:
        images, times = _read_animation(path, format)
        count: float = sum(times) / _frame_ms(format, fps)
        if len(images) == 1 and np.ptp(frames, axis=0).max() <= 8:
            # Webp merges successive frames that are nearly equal (here: up to 8 levels apart). If
            # it merges all frames into one, the file stores no duration, from which the number of
            # frames could be computed. So the number is not checked.
            count = len(frames)
        shape = (count, *images.shape[1:])
    if shape != frames.shape:
        raise MediaFailure(f"the clip read back has the shape {shape} instead of {frames.shape}")


def _encode_mp4(
    path: Path, frames: Frames, fps: float, crf: int, text: str, audio: AudioSamples | None
) -> None:
    count, height, width, _ = frames.shape
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-video_size", f"{width}x{height}"]
    source += ["-framerate", str(frame_rate(fps)), "-i", "pipe:0"]
    filters = f"{EXACT_SCALE}:out_color_matrix=bt709:out_range=tv,format=yuv420p,{_BT709}"
    codec = ["-vf", filters, "-c:v", "libx264", "-crf", str(crf)]
    tags = ["-movflags", "use_metadata_tags+faststart", "-map_metadata", "1"]
    maps = ["-map", "0:v"]
    # Metadata and sound are passed in files, because stdin carries the frames, and Linux limits an
    # argument to 128 KiB.
    with tempfile.TemporaryFile() as listing, tempfile.TemporaryFile() as audio_file:
        escaped = re.sub(r"([=;#\\\n])", r"\\\1", text)
        listing.write(f";FFMETADATA1\n{_KEY}={escaped}\n".encode())
        listing.seek(0)
        source += ["-f", "ffmetadata", "-i", f"pipe:{listing.fileno()}"]
        if audio is not None:
            samples, rate = audio
            audio_file.write(np.ascontiguousarray(samples, "<i2").data)
            audio_file.seek(0)
            source += ["-f", "s16le", "-ar", str(rate), "-ac", str(samples.shape[1])]
            source += ["-i", f"pipe:{audio_file.fileno()}"]
            maps += ["-map", "2:a", "-c:a", "aac", "-b:a", "192k"]
        target = [*maps, *codec, *tags, "-f", "mp4", f"file:{path}"]
        run_ffmpeg(
            ["-y", *source, *target],
            frames,
            seconds=_WRITE_SECONDS + count,
            files=(listing.fileno(), audio_file.fileno()),
        )


def read_audio(path: Path) -> AudioSamples:
    """Return the sound of an mp4, int16 of shape (N, 2), and its rate, 48 kHz.

    Raises:
        InputError: The file has no sound, or cannot be read.
    """
    rate = 48000
    output = ["-map", "0:a:0", "-ar", str(rate), "-ac", "2", "-f", "s16le", "pipe:1"]
    with _reading(path, "mp4"):
        data = run_ffmpeg([*mp4_source(path), *output], seconds=_READ_SECONDS)
    return np.frombuffer(data, "<i2").reshape(-1, 2), rate


def _check_audio(path: Path, audio: AudioSamples) -> None:
    """Raise a `MediaFailure` unless the sound of a written mp4 has the duration of `audio`."""
    samples, rate = audio
    read, read_rate = read_audio(path)
    read_seconds, seconds = len(read) / read_rate, len(samples) / rate
    # An AAC encoder makes the sound longer by at most two blocks: it delays the sound, and pads the
    # last block.
    longest = (len(samples) + 2 * _AAC_BLOCK) / rate
    if not seconds - 1e-3 <= read_seconds <= longest:
        raise MediaFailure(f"the sound read back lasts {read_seconds} s instead of {seconds} s")


def _frame_ms(format: VideoFormat, fps: float) -> int:
    # GIF stores durations in 1/100 s. Browsers replace durations below 2/100 s by 10/100 s, so
    # 2/100 s is the shortest one here.
    return max(2, round(100 / fps)) * 10 if format == "gif" else round(1000 / fps)


def _encode_animation(frames: Frames, format: VideoFormat, fps: float, text: str) -> bytes:
    first, *rest = (Image.fromarray(frame) for frame in frames)
    exif = Image.Exif()
    exif[ExifTags.Base.ImageDescription] = text
    extra = {"comment": text.encode()} if format == "gif" else {"exif": exif, "quality": 90}
    # The clip is encoded in memory and then written, because Pillow's errors do not say that the
    # disk is full.
    buffer = io.BytesIO()
    first.save(
        buffer,
        format,
        save_all=True,
        append_images=rest,
        loop=0,
        duration=_frame_ms(format, fps),
        **extra,
    )
    return buffer.getvalue()


def _read_animation(path: Path, format: VideoFormat) -> tuple[Frames, list[int]]:
    """Return the frames of a gif or webp, uint8 (F, H, W, 3), and the milliseconds of each."""
    times: list[int] = []

    def images(animation: Image.Image) -> Iterator[Image.Image]:
        for image in ImageSequence.Iterator(animation):
            yield image
            # A frame's duration is known only after the frame is decoded.
            times.append(int(image.info.get("duration", 0)))

    with Image.open(path, formats=[format]) as animation:
        return _stack_frames(images(animation)), times


def _write_folder(folder: Path, frames: Frames, text: str) -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text(_KEY, text)
    for index, frame in enumerate(frames):
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "PNG", pnginfo=info)
        file = folder / f"{index:05d}.png"
        file.write_bytes(buffer.getvalue())
        fsync(file)


def _stack_frames(images: Iterable[Image.Image]) -> Frames:
    """Decode a stored clip's frames to (F, H, W, 3); raise an error above a clip's limits."""
    frames: list[Frames] = []
    for image in images:
        _check_clip_size(len(frames) + 1, image.height, image.width)
        frames.append(np.asarray(image.convert("RGB")))
    if not frames:
        raise MediaFailure("the clip has no frames")
    return np.stack(frames)


def _check_clip_size(num_frames: int, height: int, width: int) -> None:
    """Raise a `MediaFailure` if a stored clip exceeds the limits, before it fills the memory."""
    if num_frames > MAX_FRAMES or num_frames * height * width > MAX_CLIP_PIXELS:
        limits = f"{MAX_FRAMES} frames or {MAX_CLIP_PIXELS} pixels"
        raise MediaFailure(f"the clip has more than {limits}, the limits of a clip")


def _metadata_text(path: Path) -> str | None:
    if path.suffix in (".gif", ".webp") or path.is_dir():
        file = path / "00000.png" if path.is_dir() else path
        with Image.open(file, formats=["GIF", "WEBP", "PNG"]) as image:
            text = image.info.get("comment") or image.info.get(_KEY)
            return text or image.getexif().get(ExifTags.Base.ImageDescription)
    listing = run_ffmpeg([*mp4_source(path), "-f", "ffmetadata", "pipe:1"], seconds=_READ_SECONDS)
    # Whole entries are searched, not lines, because another tag's text may contain a line that
    # looks like svdpp's entry.
    for entry in _ENTRY.findall(listing.decode(errors="replace")):
        if entry.startswith(f"{_KEY}="):
            return re.sub(r"\\(.)", r"\1", entry.removeprefix(f"{_KEY}="))
    return None
