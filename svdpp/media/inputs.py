"""What clips are made from: images and videos that are found, checked, read and fitted; prompts."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from PIL import Image

from svdpp.config import ClipRequest, PipelineConfig, SamplingConfig
from svdpp.config.pipeline import IMAGE
from svdpp.config.sampling import PromptedSampling
from svdpp.errors import InputError, RequestError
from svdpp.media.image import (
    MAX_PIXELS,
    Photo,
    check_file,
    check_size,
    demuxer_of,
    fit_photo,
    photo_of,
    read_bytes,
    read_photo,
)
from svdpp.media.video import MediaFailure, ppm_frames

#: Suffixes of the files that are taken from a folder or a pattern.
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")

# Characters of a prompt in the name of its clips.
_NAME_CHARACTERS = 48


@dataclass(frozen=True)
class ClipInput:
    """What a clip is made from, besides its seed: an image or a video, a prompt, or both."""

    photo: Photo | None = None
    prompt: str | None = None
    negative_prompt: str | None = None
    videos: tuple[tuple[str, Photo], ...] = ()
    """The further videos that the family takes, by name."""

    @property
    def name(self) -> str:
        """The part of its clips' file names that stands for the input."""
        if self.photo is not None:
            return self.photo.path.stem
        words = re.sub(r"[^a-z0-9]+", "-", (self.prompt or "").lower()).strip("-")
        return words[:_NAME_CHARACTERS].rstrip("-") or "prompt"

    def request(self, seed: int) -> ClipRequest:
        """The request of its clip with `seed`, without an output."""
        return ClipRequest(
            seed=seed,
            image=None if self.photo is None else str(self.photo.path),
            image_sha256=None if self.photo is None else self.photo.sha256,
            prompt=self.prompt,
            negative_prompt=self.negative_prompt,
            videos={name: str(video.path) for name, video in self.videos},
            videos_sha256={name: video.sha256 for name, video in self.videos},
        )

    def __str__(self) -> str:
        if self.photo is not None:
            return repr(str(self.photo.path))
        text = self.prompt or ""
        return repr(text if len(text) <= 60 else text[:57] + "...")


def in_turn(inputs: Sequence[ClipInput], seeds: Sequence[int], count: int) -> list[ClipRequest]:
    """All inputs with the first seed, then all with the second, and so on, in a cycle."""
    return [
        inputs[clip % len(inputs)].request(seeds[clip // len(inputs) % len(seeds)])
        for clip in range(count)
    ]


def check_inputs(inputs: Sequence[str], video_frames: int | None = None) -> list[Photo]:
    """The images that `inputs` name, decoded completely; one error lists all problems."""
    photos, problems = sift_inputs(inputs, video_frames=video_frames)
    raise_all(problems)
    return photos


def sift_inputs(
    inputs: Sequence[str],
    *,
    recursive: bool = False,
    max_pixels: int = MAX_PIXELS,
    video_frames: int | None = None,
) -> tuple[list[Photo], list[InputError]]:
    """The images that can be used, each once, and an error for each input that cannot.

    With `video_frames` they are videos that have as many frames.

    Args:
        inputs: each is a file (with any suffix), a folder (its files with a suffix of an image or a
            video, by name, without hidden ones) or, if no file has that literal name, a glob
            pattern with `*`, `?`, `[]` or `**` (files with such a suffix, by name).
        recursive: whether to search subfolders, except hidden ones and links.
    """
    photos: list[Photo] = []
    problems: list[InputError] = []
    seen: set[str] = set()
    for text in inputs:
        with _noted(problems):
            for path in _expand(text, recursive=recursive, videos=video_frames is not None):
                with _noted(problems):
                    check_file(path)
                    real = os.path.realpath(path)
                    if real in seen:
                        continue
                    seen.add(real)
                    if video_frames is None:
                        photos.append(read_photo(path, max_pixels)[1])
                    else:
                        photos.append(read_video(path, video_frames, max_pixels))
    if not photos:
        raise_all(problems)
    return photos, problems


@contextlib.contextmanager
def _noted(problems: list[InputError]) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        problems.append(error)


def raise_all(problems: Sequence[InputError], hint: str = "") -> None:
    """Raise a single problem unchanged, several as one error that lists them.

    Args:
        hint: of the error; added to the hint of a single problem.
    """
    if len(problems) == 1:
        raise InputError(problems[0].message, "; ".join(filter(None, (problems[0].hint, hint))))
    if problems:
        lines = [f"{len(problems)} inputs cannot be used:", *(each.message for each in problems)]
        raise InputError("\n  ".join(lines), hint)


def _expand(text: str, *, recursive: bool, videos: bool) -> Iterator[Path]:
    """The files that one input names, unchecked; InputError if it names none."""
    path = Path(text)
    if not text:
        raise InputError("'' is an empty name")
    if os.path.isdir(text):
        files = list(_files_in(path, recursive=recursive))
    elif not os.path.lexists(text) and "\0" not in text and any(char in text for char in "*?["):
        files = [Path(match) for match in sorted(glob.glob(text, recursive=True))]
    else:
        yield path
        return
    suffixes, kind = (VIDEO_SUFFIXES, "videos") if videos else (SUFFIXES, "images")
    fitting = [file for file in files if _has(file, suffixes)]
    if not fitting:
        what = "is a folder without" if os.path.isdir(text) else "matches no"
        within = _files_in(path, recursive=True) if os.path.isdir(text) else iter(())
        deeper = any(_has(file, suffixes) for file in within)
        hint = f"use --recursive: its subfolders have {kind}" if deeper else ""
        raise InputError(f"{text!r} {what} {kind} ({' '.join(suffixes)})", hint)
    yield from fitting


def _files_in(folder: Path, *, recursive: bool) -> Iterator[Path]:
    """The folder's files by name, then those of its subfolders, without hidden ones."""

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename!r} cannot be read: {error.strerror}") from None

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if recursive and name[0] != ".")
        yield from (Path(parent, name) for name in sorted(names) if name[0] != ".")


def _has(path: Path, suffixes: Collection[str]) -> bool:
    return path.suffix.lower() in suffixes and not path.is_dir()


_FOLDER = Path(__file__).resolve().parent.parent / "assets" / "photos"

#: For commands that need any prompt.
EXAMPLE_PROMPT = "a rowing boat drifts on a calm lake"


def example_photos() -> list[Path]:
    """Four images, sorted by name; the README in their folder gives their origin."""
    return sorted(_FOLDER.glob("*.jpg"))


def numbered_prompt(prompt: str, number: int) -> str:
    """`prompt` for one of several clips; they differ, because a rank encodes equal ones once."""
    return f"{prompt}, take {number}"


def example_requests(
    config: PipelineConfig, num_clips: int, *, seed: int = 0, prompt: str | None = None
) -> list[ClipRequest]:
    """Clips with all that the model needs: the first image, a prompt, or both.

    Each has its own seed and, if the model takes prompts, its own prompt: `prompt` or an example.
    """
    sampling, is_dummy = config.sampling, config.model.is_dummy
    takes_prompts = isinstance(sampling, PromptedSampling)
    if prompt is not None and not takes_prompts:
        raise RequestError(f"--prompt is not for {config.model.name}", "leave --prompt out")
    takes_image = sampling.from_image if isinstance(sampling, PromptedSampling) else not is_dummy
    image = str(example_photos()[0]) if takes_image else None
    text = EXAMPLE_PROMPT if prompt is None else prompt
    return [
        ClipRequest(
            seed=seed + clip,
            image=image,
            videos={} if image is None else dict.fromkeys(sampling.videos, image),
            prompt=numbered_prompt(text, clip + 1) if takes_prompts else None,
        )
        for clip in range(num_clips)
    ]


#: An image, the frames of a video, or several of both by name.
Source = Image.Image | list[Image.Image] | dict[str, Image.Image | list[Image.Image]]

#: Suffixes of the videos that are taken from a folder or a pattern.
VIDEO_SUFFIXES = (".mp4", ".mov", ".m4v", ".webm", ".mkv")

_DECODERS = "h264,hevc,av1,libdav1d,vp8,vp9,mpeg4,mjpeg,prores"
_SECONDS = 600.0


def source_of(
    data: bytes, path: Path, sampling: SamplingConfig, name: str = IMAGE
) -> tuple[Image.Image | list[Image.Image], Photo]:
    """The file `name` of a clip of `sampling`, from its bytes; `path` names it in messages.

    The frames of a video get their size by the filter with which diffusers resizes them. An image
    stands for a video that shows nothing else.
    """
    side, fit = sampling.videos.get(name), sampling.fit
    width, height = side or sampling.width, side or sampling.height
    if name == IMAGE and not sampling.from_video:
        image, photo = photo_of(data, path)
        return fit_photo(image, width, height, fit), photo
    frames, size = [], (0, 0)
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        for frame in _frames(data, file, path, sampling.frames, MAX_PIXELS):
            size = frame.size
            fitted = fit_photo(frame, width, height, fit)
            frames.append(fitted.resize((width, height), Image.Resampling.LANCZOS))
    return frames, Photo(path, hashlib.sha256(data).hexdigest(), *size)


def read_source(request: ClipRequest, sampling: SamplingConfig) -> Source | None:
    """All that a clip starts from besides a prompt; None if that is nothing.

    Raises:
        InputError: a file cannot be used, or is not the one whose SHA-256 the request has.
    """
    found = {}
    for name, (path, sha256) in request.files.items():
        found[name], photo = source_of(read_bytes(Path(path)), Path(path), sampling, name)
        if sha256 not in (None, photo.sha256):
            raise InputError(f"{path!r} has changed since the run began")
    return found if sampling.videos else found.get(IMAGE)


def read_video(path: Path, num_frames: int, max_pixels: int) -> Photo:
    """Checks that a video has as many frames, all of which are decoded; writes no file."""
    data = read_bytes(path)
    with path.open("rb") as file:
        *_, size = (frame.size for frame in _frames(data, file, path, num_frames, max_pixels))
    return Photo(path, hashlib.sha256(data).hexdigest(), *size)


def _frames(
    data: bytes, file: IO[bytes], path: Path, count: int, max_pixels: int
) -> Iterator[Image.Image]:
    """The first `count` frames, upright, one at a time; `file` has the same bytes as `data`."""
    demuxer, done = demuxer_of(data), 0
    if demuxer is None:
        yield from itertools.repeat(photo_of(data, path, max_pixels)[0], count)
        return
    # ffmpeg can open no other file.
    source = ["-protocol_whitelist", "file", "-codec_whitelist", _DECODERS]
    source += ["-filter_threads", "1", "-max_pixels", str(max_pixels), "-threads", "2"]
    source += ["-f", demuxer, "-i", f"file:/dev/fd/{file.fileno()}", "-frames:v", str(count)]
    name = repr(str(path))
    try:
        for frame in ppm_frames(source, seconds=_SECONDS, files=(file.fileno(),)):
            check_size(*frame.size, max_pixels)
            yield frame
            done += 1
    except TimeoutError:
        text = f"{name} takes longer than {_SECONDS:.0f} s to decode"
        raise InputError(text, "save it as H.264") from None
    except MediaFailure as error:
        text = f"{name} cannot be decoded as a video: {error}"
        raise InputError(text, "save it as H.264") from error
    except InputError as error:
        raise InputError(f"{name} {error.message}", error.hint) from None
    if done < count:
        text = f"{name} has {done} of the {count} frames that the clip takes"
        raise InputError(text, "use fewer --frames")
