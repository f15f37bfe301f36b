"""Inputs of clips: prompts, and images and videos, which are searched, read, checked and fitted.

Files are untrusted. Each is read once, so that the hashed bytes are the decoded bytes.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import itertools
import os
import shlex
import stat
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np
from PIL import ExifTags, Image, ImageOps, ImageSequence, UnidentifiedImageError

from svdpp.config import DEMO_MODELS, ClipRequest, Fit, Lora, PipelineConfig, SamplingConfig
from svdpp.config.limits import MAX_MEGAPIXELS
from svdpp.config.pipeline import IMAGE, LAST_IMAGE
from svdpp.config.sampling import PromptedSampling
from svdpp.errors import InputError, RequestError, first_line
from svdpp.media.ffmpeg import MediaFailure, decode_frames
from svdpp.media.kinds import FORMATS, demuxer_of, unsupported_kind
from svdpp.media.output_files import error_reason
from svdpp.media.prompts import slugify_prompt
from svdpp.media.streams import Stream, main_video, probe_streams

#: Suffixes of image files that are found in a folder or by a glob pattern.
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif")
VIDEO_SUFFIXES = (".mp4", ".mov", ".m4v", ".webm", ".mkv")

_DECODERS = "h264,hevc,av1,libdav1d,vp8,vp9,mpeg4,mjpeg,prores"
_DECODE_SECONDS = 600.0
_DAMAGED = (
    "copy or download it again; if a player shows it, save it as H.264: ffmpeg -i IN -c:v libx264 "
    "out.mp4"
)
# Formats of images that can be animations. The pages of a TIFF are not frames.
_ANIMATED = tuple(name for name in FORMATS if name in ("GIF", "WEBP", "PNG", "AVIF"))

MAX_FILE_BYTES = 256 * 2**20
MAX_PIXELS = MAX_MEGAPIXELS * 10**6
_MIN_SIDE = 16
_MAX_ASPECT = 16
# Maximum number of pixels of a padded image. Padding a narrow image to a wide frame multiplies its
# pixels.
_MAX_PADDED_PIXELS = 4 * MAX_PIXELS
_SMALLER = f"make it smaller, or raise `max_megapixels` (at most {MAX_MEGAPIXELS})"
_BAND_ROWS = 64
_ORIENTATION = ExifTags.Base.Orientation

#: Decoded input of a clip: image; frames of a video; or, for several files, images and frames by
#: name.
DecodedMedia = Image.Image | list[Image.Image] | dict[str, Image.Image | list[Image.Image]]


#: Name of a conversion of an image's colours in which svdpp differs from diffusers' `load_image`;
#: empty: no conversion.
Conversion = Literal["", "over white", "scaled"]


@dataclass(frozen=True)
class MediaFile:
    """Image or video that was read."""

    path: Path
    sha256: str
    """SHA-256 of the file, in hex."""
    width: int
    """Width of the upright image in pixels."""
    height: int
    """Height of the upright image in pixels."""
    conversion: Conversion = ""
    """Conversion by which the image's colours differ from the result of diffusers' `load_image`;
    empty: none."""


@dataclass(frozen=True)
class ClipInput:
    """Inputs of a clip besides its seed: images or a video, a prompt, or both."""

    media_file: MediaFile | None = None
    prompt: str | None = None
    negative_prompt: str | None = None
    videos: tuple[tuple[str, MediaFile], ...] = ()
    """Further videos that the model's family takes, such as a control video, by name."""
    last_image: MediaFile | None = None
    """Image that becomes the clip's last frame; None: the last frame is not given."""
    loras: tuple[Lora, ...] = ()
    """LoRAs that the request adds to the model for this clip."""

    @property
    def name(self) -> str:
        """Name of the input in file names of clips: stem of the image, or words of the prompt."""
        if self.media_file is not None:
            return self.media_file.path.stem
        return slugify_prompt(self.prompt or "") or "prompt"

    def request(self, seed: int) -> ClipRequest:
        """Return the request of the clip with `seed`, without an output."""
        return ClipRequest(
            seed=seed,
            image=None if self.media_file is None else str(self.media_file.path),
            image_sha256=None if self.media_file is None else self.media_file.sha256,
            prompt=self.prompt,
            negative_prompt=self.negative_prompt,
            last_image=None if self.last_image is None else str(self.last_image.path),
            last_image_sha256=None if self.last_image is None else self.last_image.sha256,
            videos={name: str(video.path) for name, video in self.videos},
            videos_sha256={name: video.sha256 for name, video in self.videos},
            loras=self.loras,
        )

    def __str__(self) -> str:
        if self.media_file is not None:
            return repr(str(self.media_file.path))
        text = self.prompt or ""
        return repr(text if len(text) <= 60 else text[:57] + "...")


def round_robin(inputs: Sequence[ClipInput], seeds: Sequence[int], count: int) -> list[ClipRequest]:
    """Return requests for all inputs with the first seed, then with the second seed, and so on.

    After the last seed, the first one follows again.

    Args:
        inputs: Inputs, at least one.
        seeds: Seeds, at least one.
        count: Number of requests.
    """
    return [
        inputs[clip % len(inputs)].request(seeds[clip // len(inputs) % len(seeds)])
        for clip in range(count)
    ]


# Minimum ratio between the aspect ratios of frame and image for which a remark is printed.
_STRETCHED = 1.25


_CONVERSIONS: dict[Conversion, tuple[str, str]] = {
    "over white": ("laid over white", "its transparent parts show the colours under them"),
    "scaled": ("scaled from 16 bits to 8", "its greys above 255 are white"),
}


def input_remarks(files: Iterable[MediaFile], sampling: SamplingConfig) -> list[str]:
    """Return remarks on unexpected conversions of images: one remark for each kind of conversion.

    Args:
        files: Images or videos of the clips.
        sampling: Sampling parameters; with the `fit` stretch images are left to the pipeline, which
            stretches or crops them.
    """
    files = list(dict.fromkeys(files))
    remarks = []
    shape = sampling.width / sampling.height
    ratios = {file: file.width / file.height / shape for file in files}
    stretched = [file for file in files if not 1 / _STRETCHED <= ratios[file] <= _STRETCHED]
    if stretched and sampling.fit == "stretch":
        done, instead = "stretched", "crop or pad keeps its shape"
        if sampling.crops_image:
            done, instead = "cropped", "pad keeps all of it"
        remarks.append(
            f"{_name_first(stretched)} {done} to {sampling.width}x{sampling.height}, as by "
            f"diffusers; `fit` {instead}"
        )
    for conversion, (done, instead) in _CONVERSIONS.items():
        if converted := [file for file in files if file.conversion == conversion]:
            remarks.append(
                f"{_name_first(converted)} {done}; read by diffusers' load_image, {instead}"
            )
    return remarks


def _name_first(files: Sequence[MediaFile]) -> str:
    first = files[0]
    more = f" and {len(files) - 1} more are" if len(files) > 1 else " is"
    return f"{str(first.path)!r} ({first.width}x{first.height}){more}"


# --- search for input files -----------------------------------------------------------------------


def check_inputs(inputs: Sequence[str], video_frames: int | None = None) -> list[MediaFile]:
    """Return the images or videos that `inputs` name, after decoding them completely.

    Args:
        inputs: Files, folders and glob patterns; see `collect_inputs`.
        video_frames: Frames that each video must have; None for images.

    Raises:
        InputError: Inputs cannot be used; the error lists all problems.
    """
    files, problems = collect_inputs(inputs, video_frames=video_frames)
    raise_problems(problems)
    return files


def collect_inputs(
    inputs: Sequence[str],
    *,
    max_pixels: int = MAX_PIXELS,
    video_frames: int | None = None,
) -> tuple[list[MediaFile], list[InputError]]:
    """Return the usable images or videos, without duplicates, and an error for each other input.

    Args:
        inputs: Each a file (with any suffix), a folder (its files with a suffix of an image or a
            video, without hidden ones) or, if no file has that literal name, a glob pattern (files
            with such a suffix).
        max_pixels: Maximum number of pixels of an image or frame.
        video_frames: Frames that each video must have; None for images.

    Raises:
        InputError: None of the inputs can be used.
    """
    files: list[MediaFile] = []
    problems: list[InputError] = []
    seen: set[str] = set()
    for text in inputs:
        with _collect_errors(problems):
            for path in _expand(text, videos=video_frames is not None):
                real = os.path.realpath(path)
                if real in seen:
                    continue
                seen.add(real)
                with _collect_errors(problems):
                    if video_frames is None:
                        media_file = read_image(path, max_pixels)[1]
                    else:
                        media_file = probe_video(path, video_frames, max_pixels)
                    files.append(media_file)
    if not files:
        raise_problems(problems)
    return files, problems


@contextlib.contextmanager
def _collect_errors(problems: list[InputError]) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        problems.append(error)


def raise_problems(problems: Sequence[InputError], hint: str = "") -> None:
    """Raise one error that lists all problems.

    Args:
        problems: Errors of inputs; if empty, nothing is raised.
        hint: Further hint for the user.

    Raises:
        InputError: `problems` is not empty.
    """
    if len(problems) == 1:
        both = "; ".join(filter(None, (problems[0].hint, hint)))
        raise InputError(problems[0].message, both, details=problems[0].details)
    if problems:
        lines = [f"{len(problems)} inputs cannot be used:", *(each.message for each in problems)]
        each = [{"message": problem.message, **problem.details} for problem in problems]
        details = {"num_inputs": len(problems), "inputs": each}
        raise InputError("\n  ".join(lines), hint, details=details)


def _expand(text: str, *, videos: bool) -> Iterator[Path]:
    """Yield the paths of the files that an input names.

    Raises:
        InputError: The input names no file.
    """
    if not text:
        raise InputError("'' is an empty name")
    if "\0" in text:
        raise InputError(f"{text!r} cannot be read: a null byte is in its name")
    is_folder = os.path.isdir(text)
    if is_folder:
        files = _files_in(text)
    elif not os.path.lexists(text) and any(char in text for char in "*?["):
        files = [Path(name) for name in sorted(glob.glob(text, recursive=True))]
    else:
        yield Path(text)
        return
    suffixes, kind = (VIDEO_SUFFIXES, "videos") if videos else (IMAGE_SUFFIXES, "images")
    fitting = [file for file in files if file.suffix.lower() in suffixes and not file.is_dir()]
    if not fitting:
        what = "is a folder without" if is_folder else "matches no"
        hint = "the quoted pattern 'FOLDER/**/*' includes subfolders" if is_folder else ""
        raise InputError(f"{text!r} {what} {kind} ({' '.join(suffixes)})", hint)
    yield from fitting


def _files_in(folder: str) -> list[Path]:
    """Return the files of a folder, sorted by name, without hidden ones."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise InputError(f"{folder!r} cannot be read: {error.strerror}") from None
    return [Path(folder, name) for name in names if name[0] != "."]


# --- example inputs -------------------------------------------------------------------------------

_FOLDER = Path(__file__).resolve().parent.parent / "assets" / "photos"

_EXAMPLE_PROMPT = "a rowing boat drifts on a calm lake"


def example_prompt(model_name: str) -> str:
    """Return an example prompt. Demo models get a prompt from their small vocabulary.

    Args:
        model_name: Name of a model that takes prompts.
    """
    demo = DEMO_MODELS.get(model_name)
    return (demo.prompt if demo else None) or _EXAMPLE_PROMPT


def example_images() -> list[Path]:
    """Return the paths of four example images, sorted by name.

    The README in the images' folder describes their origin.
    """
    return sorted(_FOLDER.glob("*.jpg"))


#: Former name of `example_images`, which the next version will drop.
example_photos = example_images


def example_requests(
    config: PipelineConfig, num_clips: int, *, seed: int = 0, prompt: str | None = None
) -> list[ClipRequest]:
    """Return example requests with the inputs that the model needs: image, prompt, or both.

    Args:
        config: Configuration whose model and sampling parameters decide which inputs are needed.
        num_clips: Number of clips, each with another seed.
        seed: Seed of the first clip. Each further clip has the next seed.
        prompt: Prompt of all clips, if the model takes prompts; None for an example.

    Raises:
        RequestError: The model takes no prompt.
    """
    sampling, is_dummy = config.sampling, config.model.is_dummy
    takes_prompts = isinstance(sampling, PromptedSampling)
    if prompt is not None and not takes_prompts:
        raise RequestError(f"{config.model.name} takes no `prompt`", "leave `prompt` out")
    takes_image = sampling.from_image if isinstance(sampling, PromptedSampling) else not is_dummy
    first, last, *_ = map(str, example_images())
    image = first if takes_image else None
    text = example_prompt(config.model.name) if prompt is None else prompt
    return [
        ClipRequest(
            seed=seed + clip,
            image=image,
            last_image=last if sampling.has_last_image else None,
            videos={} if image is None else dict.fromkeys(sampling.videos, image),
            prompt=text if takes_prompts else None,
        )
        for clip in range(num_clips)
    ]


# --- reading of images ----------------------------------------------------------------------------


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file.

    Args:
        path: Path of a file of at most 256 MiB. Pipes and devices are rejected without waiting.

    Raises:
        InputError: The file does not exist, is empty or too large, or cannot be read.
    """
    name = repr(str(path))
    details: dict[str, object] = {"path": str(path)}
    try:
        # O_NONBLOCK, because opening a named pipe would otherwise wait for a writer.
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError(f"{name} is not a regular file", details=details)
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{name} does not exist", details=details) from None
    except (OSError, ValueError) as error:
        why = error_reason(error)
        raise InputError(
            f"{name} cannot be read: {why}", details={**details, "reason": why}
        ) from None
    if not data:
        raise InputError(f"{name} is empty (0 bytes)", details={**details, "bytes": 0})
    if len(data) > MAX_FILE_BYTES:
        details["limit_bytes"] = MAX_FILE_BYTES
        raise InputError(f"{name} is larger than {MAX_FILE_BYTES // 2**20} MiB", details=details)
    return data


def read_image(path: Path, max_pixels: int = MAX_PIXELS) -> tuple[Image.Image, MediaFile]:
    """Read an image as an upright 8-bit RGB image.

    The first frame of an animation is read. Transparent images are composited over white, because
    most cut-outs are made for light pages: over black, dark outlines and shadows would vanish.
    16-bit grey is scaled to 8 bits, not clipped. Colour profiles are not applied, because diffusers
    does not apply them.

    Args:
        path: Path of a file in one of `FORMATS`, with any suffix.
        max_pixels: Largest number of pixels.

    Raises:
        InputError: The file is not an image of these formats, or the image is damaged, or too
            large, small or narrow.
    """
    return _read_image_bytes(read_bytes(path), path, max_pixels)


def _read_image_bytes(data: bytes, path: Path, max_pixels: int) -> tuple[Image.Image, MediaFile]:
    name = repr(str(path))
    try:
        with warnings.catch_warnings():
            # Pillow warns about invalid metadata, and about large images, which are rejected below.
            warnings.simplefilter("ignore")
            image, conversion = _decode(data, max_pixels)
    except InputError as error:
        details = {"path": str(path), **error.details}
        raise InputError(f"{name} {error.message}", error.hint, details=details) from None
    except UnidentifiedImageError:
        raise _not_an_image(data, path) from None
    except Image.DecompressionBombError:
        limit = f"the limit is {max_pixels // 10**6} million pixels"
        details = {"path": str(path), "limit_pixels": max_pixels}
        raise InputError(f"{name} is too large: {limit}", _SMALLER, details=details) from None
    except MemoryError:
        details = {"path": str(path)}
        raise InputError(f"{name} does not fit in memory", details=details) from None
    except Exception as error:  # Pillow raises nearly any type of exception for malicious files
        details = {"path": str(path), "reason": first_line(error)}
        message = f"{name} is damaged or truncated: {first_line(error)}"
        raise InputError(message, details=details) from error
    sha256 = hashlib.sha256(data).hexdigest()
    return image, MediaFile(path, sha256, image.width, image.height, conversion)


def _not_an_image(data: bytes, path: Path) -> InputError:
    name = repr(str(path))
    unsupported = unsupported_kind(data)
    if unsupported is not None:
        hint = unsupported.hint.format(name=shlex.quote(str(path)))
        return InputError(f"{name} is {unsupported.name}, which is not read", hint)
    message = f"{name} is not an image in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
    if demuxer_of(data):
        hint = "give a `family` that takes a video, such as wan_v2v: svdpp models lists them"
        return InputError(f"{name} is a video, and this takes an image", hint)
    return InputError(message, "convert it to PNG or JPEG first")


def _decode(data: bytes, max_pixels: int) -> tuple[Image.Image, Conversion]:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        _check_size(*image.size, max_pixels)
        if image.format == "PNG":
            # `load()` does not check the checksums of a PNG's chunks, so a damaged byte could
            # change pixels. `verify()` does.
            with Image.open(io.BytesIO(data), formats=FORMATS) as copy:
                copy.verify()
        image.load()
        # The orientation is read after `load()`, which turns a TIFF upright and removes its
        # orientation tag.
        orientation = image.getexif().get(_ORIENTATION)
        rgb, conversion = _to_rgb(image)
    # `exif_transpose` would otherwise write all other tags, too, and fail for some of them
    rgb.info.clear()
    rgb.getexif()[_ORIENTATION] = orientation if isinstance(orientation, int) else 1
    return ImageOps.exif_transpose(rgb), conversion


def _check_size(width: int, height: int, max_pixels: int) -> None:
    size = f"{width}x{height} pixels"
    details: dict[str, int] = {"width": width, "height": height, "limit_pixels": max_pixels}
    if width * height > max_pixels:
        limit = f"the limit is {max_pixels // 10**6} million"
        raise InputError(f"is too large: {size}, {limit}", _SMALLER, details=details)
    if min(width, height) < _MIN_SIDE:
        details["min_side"] = _MIN_SIDE
        message = f"is too small: {size}, each side must have at least {_MIN_SIDE}"
        raise InputError(message, details=details)
    if max(width, height) > _MAX_ASPECT * min(width, height):
        details["max_aspect"] = _MAX_ASPECT
        message = f"is too narrow: {size}, the limit is {_MAX_ASPECT}:1"
        raise InputError(message, details={**details, "limit": f"{_MAX_ASPECT}:1"})


def _to_rgb(image: Image.Image) -> tuple[Image.Image, Conversion]:
    if image.mode in ("F", "I"):
        raise InputError(
            "has grey of 32 bits, whose white is not defined: save it with 16 bits",
            details={"bits": 32, "max_bits": 16},
        )
    if image.mode.startswith("I;16"):  # `convert` would clip 16-bit values instead of scaling them
        grey = (np.asarray(image).astype(np.uint32) + 128) // 257
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB"), "scaled"
    if not image.has_transparency_data:
        return image.convert("RGB"), ""
    is_opaque = True
    over_white = Image.new("RGB", image.size)
    # The image is converted in horizontal bands to save memory, because each conversion makes a
    # copy.
    for top in range(0, image.height, _BAND_ROWS):
        box = (0, top, image.width, min(top + _BAND_ROWS, image.height))
        rgba = image.crop(box).convert("RGBA")
        is_opaque = is_opaque and rgba.getchannel("A").getextrema()[0] == 255
        white = Image.new("RGBA", rgba.size, "white")
        over_white.paste(Image.alpha_composite(white, rgba).convert("RGB"), box)
    return over_white, "" if is_opaque else "over white"


def fit_image(image: Image.Image, width: int, height: int, fit: Fit) -> Image.Image:
    """Fit an image to the aspect ratio of a frame without resampling; diffusers resizes it later.

    Args:
        image: Upright RGB image.
        width: Width of the frame, in pixels.
        height: Height of the frame, in pixels.
        fit: `stretch` leaves the image as it is; `crop` keeps the largest centred part with the
            frame's aspect ratio; `pad` adds black bars on both sides.

    Raises:
        InputError: Padding would take too many pixels.
    """
    if fit == "stretch":
        return image
    # If an image is too wide, a crop keeps its height, and a pad extends its height. If it is too
    # narrow, a crop keeps its width, and a pad extends its width.
    too_wide = image.width * height > image.height * width
    across = max(1, round(image.height * width / height))
    down = max(1, round(image.width * height / width))
    keep_height = too_wide if fit == "crop" else not too_wide
    size = (across, image.height) if keep_height else (image.width, down)
    if size[0] * size[1] > _MAX_PADDED_PIXELS:
        raise InputError(
            f"padding {image.width}x{image.height} to the shape of {width}x{height} would take "
            f"{size[0]}x{size[1]} pixels, which is too large",
            "use `fit` crop",
            details={
                **{"image_width": image.width, "image_height": image.height},
                **{"width": width, "height": height},
                **{"padded_width": size[0], "padded_height": size[1]},
            },
        )
    left, top = (size[0] - image.width) // 2, (size[1] - image.height) // 2
    if fit == "crop":
        return image.crop((-left, -top, size[0] - left, size[1] - top))
    canvas = Image.new("RGB", size)
    canvas.paste(image, (left, top))
    return canvas


# --- inputs of a clip -----------------------------------------------------------------------------


def read_input(request: ClipRequest, sampling: SamplingConfig) -> DecodedMedia | None:
    """Read the images and videos that a clip is made from.

    Args:
        request: Request of the clip, with the paths of the files.
        sampling: Sampling parameters of the clip.

    Returns:
        Image; frames of a video; or, for several files, images and frames by name. None if the clip
        starts from text.

    Raises:
        InputError: A file cannot be read, or has changed since the run began.
    """
    found = {}
    for name, (path, sha256) in request.files.items():
        found[name], media_file = decode_input(read_bytes(Path(path)), Path(path), sampling, name)
        if sha256 not in (None, media_file.sha256):
            raise InputError(f"{path!r} has changed since the run began", details={"path": path})
    return found if sampling.videos or LAST_IMAGE in found else found.get(IMAGE)


def decode_input(
    data: bytes, path: Path, sampling: SamplingConfig, name: str = IMAGE
) -> tuple[Image.Image | list[Image.Image], MediaFile]:
    """Return one file of a clip as an image or as frames, and a description of the file.

    Frames of a video are resized with the same filter as in diffusers. An image in place of a video
    is repeated for all frames.

    Args:
        data: Content of the file.
        path: Path of the file, for messages.
        sampling: Sampling parameters of the clip.
        name: Name of the input that the file is for, such as `image` or `last_image`.

    Raises:
        InputError: The file is of the wrong kind, damaged, or exceeds a limit.
    """
    side, fit = sampling.videos.get(name), sampling.fit
    width, height = side or sampling.width, side or sampling.height
    if name == LAST_IMAGE or (name == IMAGE and not sampling.from_video):
        image, media_file = _read_image_bytes(data, path, MAX_PIXELS)
        return fit_image(image, width, height, fit), media_file
    frames, size = [], (0, 0)
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        for frame in _frames(data, file, path, sampling.frames, MAX_PIXELS):
            size = frame.size
            fitted = fit_image(frame, width, height, fit)
            frames.append(fitted.resize((width, height), Image.Resampling.LANCZOS))
    return frames, MediaFile(path, hashlib.sha256(data).hexdigest(), *size)


def probe_video(path: Path, num_frames: int, max_pixels: int) -> MediaFile:
    """Check that a video has enough frames, by decoding them.

    Args:
        path: Path of a video, animation or image. An image is repeated for all frames.
        num_frames: Number of frames that the clip uses.
        max_pixels: Largest number of pixels of a frame.

    Returns:
        Description of the file. Width and height are those of the last frame that was decoded.

    Raises:
        InputError: The file has too few frames, cannot be decoded, or exceeds a limit.
    """
    data = read_bytes(path)
    with path.open("rb") as file:
        *_, size = (frame.size for frame in _frames(data, file, path, num_frames, max_pixels))
    return MediaFile(path, hashlib.sha256(data).hexdigest(), *size)


def _frames(
    data: bytes, file: IO[bytes], path: Path, count: int, max_pixels: int
) -> Iterator[Image.Image]:
    """Yield the first frames of a file, upright, one at a time; an image is repeated.

    Args:
        data: Content of the file.
        file: Open file with the same content, for ffmpeg.
        path: Path of the file, for messages.
        count: Number of frames.
        max_pixels: Maximum number of pixels of a frame.
    """
    demuxer = demuxer_of(data)
    if demuxer is not None:
        frames = _video_frames(demuxer, file, path, count, max_pixels)
    elif _is_animation(data):
        frames = _animation_frames(data, path, count, max_pixels)
    else:
        yield from itertools.repeat(_read_image_bytes(data, path, max_pixels)[0], count)
        return
    done = 0
    for frame in frames:
        yield frame
        done += 1
    if done < count:
        text = f"{str(path)!r} has {done} of the {count} frames that the clip takes"
        raise InputError(text, "use fewer `num_frames`", details={"frames": done, "wanted": count})


def _is_animation(data: bytes) -> bool:
    try:
        with Image.open(io.BytesIO(data), formats=_ANIMATED) as image:
            return int(getattr(image, "n_frames", 1)) > 1
    except Exception:  # `_read_image_bytes` will report the error of the file
        return False


def _animation_frames(
    data: bytes, path: Path, count: int, max_pixels: int
) -> Iterator[Image.Image]:
    """Yield each stored frame of a GIF, WebP, PNG or AVIF once, whatever its duration."""
    name = repr(str(path))
    try:
        with Image.open(io.BytesIO(data), formats=_ANIMATED) as animation:
            _check_size(*animation.size, max_pixels)
            for frame in itertools.islice(ImageSequence.Iterator(animation), count):
                yield _to_rgb(frame)[0]
    except InputError as error:
        raise InputError(f"{name} {error.message}", error.hint, details=error.details) from None
    except Exception as error:  # Pillow raises nearly any type of exception for malicious files
        details = {"path": str(path), "reason": first_line(error)}
        message = f"{name} is damaged or truncated: {first_line(error)}"
        raise InputError(message, details=details) from error


def _video_frames(
    demuxer: str, file: IO[bytes], path: Path, count: int, max_pixels: int
) -> Iterator[Image.Image]:
    name = repr(str(path))
    # These options keep ffmpeg from opening other files or network addresses.
    source = ["-protocol_whitelist", "file", "-codec_whitelist", _DECODERS]
    source += ["-filter_threads", "1", "-max_pixels", str(max_pixels), "-threads", "2"]
    source += ["-f", demuxer, "-i", f"file:/dev/fd/{file.fileno()}"]
    files, done = (file.fileno(),), 0
    try:
        streams = probe_streams(source, files, seconds=_DECODE_SECONDS)
        video = main_video(streams)
        if video is None:
            raise _no_video(name, streams)
        source += ["-frames:v", str(count)]
        for frame in decode_frames(
            source, seconds=_DECODE_SECONDS, stream=f"0:{video.index}", files=files
        ):
            _check_size(*frame.size, max_pixels)
            yield frame
            done += 1
    except MediaFailure as error:
        text = f"{name} cannot be decoded as a video: {error}"
        if done:
            text = f"{name} is damaged or cut off after frame {done}: {error}"
        raise InputError(text, _DAMAGED, details={"frames": done, "reason": str(error)}) from error
    except InputError as error:
        message = error.message if error.message.startswith(name) else f"{name} {error.message}"
        raise InputError(message, error.hint, details=error.details) from None


def _no_video(name: str, streams: Sequence[Stream]) -> InputError:
    if not streams:
        return InputError(
            f"{name} cannot be decoded as a video: it is cut off, or its index is damaged",
            "copy or download it again: the whole file is needed",
        )
    if any(each.is_cover for each in streams):
        held = "a cover picture and no video"
    else:
        held = f"only {' and '.join(each.kind for each in streams)}"
    return InputError(f"{name} has no video: it holds {held}", "give a file with a video")
