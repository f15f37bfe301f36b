"""Inputs of clips: prompts, images and videos; search for input files, and example inputs."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from svdpp.config import DEMO_MODELS, ClipRequest, Lora, PipelineConfig, SamplingConfig
from svdpp.config.pipeline import IMAGE
from svdpp.config.sampling import PromptedSampling
from svdpp.errors import InputError, RequestError
from svdpp.media.images import (
    MAX_PIXELS,
    Conversion,
    MediaFile,
    decode_image,
    fit_image,
    read_bytes,
    read_image,
)
from svdpp.media.prompts import slugify_prompt
from svdpp.media.video_frames import decode_video, probe_video

#: Suffixes of image files. If an input is a folder or a glob pattern, files with other suffixes are
#: skipped. A file that is named directly may have any suffix.
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif")
#: Suffixes of video files, used in the same way as `IMAGE_SUFFIXES`.
VIDEO_SUFFIXES = (".mp4", ".mov", ".m4v", ".webm", ".mkv")

#: Decoded input of a clip: an image; the frames of a video; or, for several files, a dict of images
#: and frames by the name of the input, such as `last_image`.
DecodedMedia = Image.Image | list[Image.Image] | dict[str, Image.Image | list[Image.Image]]


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
    references: tuple[MediaFile, ...] = ()
    """Reference images, which show what should appear in the clip, in the order in which the model
    gets them."""

    @property
    def images(self) -> tuple[MediaFile, ...]:
        """Metadata of the clip's input image (or input video), last image and references."""
        first = (self.media_file, self.last_image)
        return (*(file for file in first if file is not None), *self.references)

    @property
    def name(self) -> str:
        """Name of the input in file names of clips: stem of the image, or words of the prompt."""
        if self.media_file is not None:
            return self.media_file.path.stem
        return slugify_prompt(self.prompt or "") or "prompt"

    def request(self, seed: int) -> ClipRequest:
        """Return a request, without an output file, for a clip of these inputs with `seed`."""
        return ClipRequest(
            seed=seed,
            image=None if self.media_file is None else str(self.media_file.path),
            image_sha256=None if self.media_file is None else self.media_file.sha256,
            prompt=self.prompt,
            negative_prompt=self.negative_prompt,
            last_image=None if self.last_image is None else str(self.last_image.path),
            last_image_sha256=None if self.last_image is None else self.last_image.sha256,
            references=tuple(str(image.path) for image in self.references),
            references_sha256=tuple(image.sha256 for image in self.references),
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
    """Return requests for clips of all inputs with the first seed, then with the second, and so on.

    After the last seed, the requests begin again with the first seed.

    Args:
        inputs: Inputs, at least one.
        seeds: Seeds, at least one.
        count: Number of requests.
    """
    return [
        inputs[clip % len(inputs)].request(seeds[clip // len(inputs) % len(seeds)])
        for clip in range(count)
    ]


# --- remarks on inputs ----------------------------------------------------------------------------

# A remark is printed if the aspect ratios of image and frame differ by more than this factor.
_STRETCHED = 1.25
# Words of the remark on each conversion: what svdpp does with the image, and how the image would
# look if diffusers' `load_image` read it instead.
_CONVERSIONS: dict[Conversion, tuple[str, str]] = {
    "over white": ("laid over white", "its transparent parts would show the colours under them"),
    "scaled": ("scaled from 16 bits to 8", "its greys above 255 would be white"),
}


def input_remarks(files: Iterable[MediaFile], sampling: SamplingConfig) -> list[str]:
    """Return remarks for the user on images that are stretched, cropped or changed in colour.

    Args:
        files: Images or videos of the clips.
        sampling: Sampling parameters of the clips. Remarks on stretched or cropped images are
            returned only if `fit` is `stretch`, which leaves the resize to diffusers' pipeline.
    """
    files = list(dict.fromkeys(files))
    remarks = []
    shape = sampling.width / sampling.height
    ratios = {file: file.width / file.height / shape for file in files}
    stretched = [file for file in files if not 1 / _STRETCHED <= ratios[file] <= _STRETCHED]
    if stretched and sampling.fit == "stretch" and not sampling.keeps_image_shape:
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
                f"{_name_first(converted)} {done}; if diffusers' load_image read it, {instead}"
            )
    return remarks


def check_image_shapes(files: Iterable[MediaFile], sampling: SamplingConfig) -> None:
    """Raise an `InputError` if an image's aspect ratio exceeds the limit of the model's family.

    Args:
        files: Images of clips.
        sampling: Sampling parameters of the clips. If `fit` is `crop` or `pad`, nothing is checked,
            because images get the clip's aspect ratio.

    Raises:
        InputError: The longer side of an image is too long for its shorter side.
    """
    highest = sampling.max_image_aspect
    if highest is None or sampling.fit != "stretch":
        return
    for file in files:
        if max(file.width, file.height) > highest * min(file.width, file.height):
            raise InputError(
                f"{str(file.path)!r} is too narrow: {file.width}x{file.height}, and the model "
                f"takes images up to {highest}:1",
                "use `fit` crop or pad to give the image the clip's aspect ratio",
                details={"width": file.width, "height": file.height, "max_aspect": highest},
            )


def _name_first(files: Sequence[MediaFile]) -> str:
    first = files[0]
    more = f" and {len(files) - 1} more are" if len(files) > 1 else " is"
    return f"{str(first.path)!r} ({first.width}x{first.height}){more}"


# --- search for input files -----------------------------------------------------------------------


def check_inputs(inputs: Sequence[str], video_frames: int | None = None) -> list[MediaFile]:
    """Decode all input images or videos as a check, and return their metadata.

    Args:
        inputs: Files, folders and glob patterns; see `collect_inputs`.
        video_frames: Number of frames that each video must have at least. None: the inputs are
            images.

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
    """Return the metadata of the usable input images or videos, and an error for each other input.

    Args:
        inputs: Files with any suffix, folders, and glob patterns. A folder stands for its files
            with a suffix of an image (or of a video, if `video_frames` is given), except hidden
            files. A pattern stands for all matching files with such a suffix. A text that is the
            name of an existing file is not used as a pattern, even if it contains `*`, `?` or `[`.
        max_pixels: Maximum number of pixels of an image or frame.
        video_frames: Number of frames that each video must have at least. None: the inputs are
            images.

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
    """Raise one `InputError` that lists all problems of input files; do nothing if there are none.

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
    """Yield the paths of the images or videos that a name, folder or glob pattern stands for.

    Raises:
        InputError: The input names no file.
    """
    if not text:
        raise InputError("the name of an input is empty")
    if "\0" in text:
        raise InputError(f"{text!r} cannot be read: its name contains a null byte")
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
    """Return the files of a folder, except hidden files, sorted by name."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise InputError(f"{folder!r} cannot be read: {error.strerror}") from None
    return [Path(folder, name) for name in names if name[0] != "."]


# --- example inputs -------------------------------------------------------------------------------

_FOLDER = Path(__file__).resolve().parent.parent / "assets" / "photos"

_EXAMPLE_PROMPT = "a rowing boat drifts on a calm lake"


def example_prompt(model_name: str) -> str:
    """Return an example prompt for a model. Demo models get one from their small vocabulary.

    Args:
        model_name: Name of a model that takes prompts.
    """
    demo = DEMO_MODELS.get(model_name)
    return (demo.prompt if demo else None) or _EXAMPLE_PROMPT


def example_images() -> list[Path]:
    """Return the paths of svdpp's four example images, sorted by name.

    The README in the images' folder says where the images are from.
    """
    return sorted(_FOLDER.glob("*.jpg"))


#: Former name of `example_images`. The next version will drop this former name.
example_photos = example_images


def example_requests(
    config: PipelineConfig, num_clips: int, *, seed: int = 0, prompt: str | None = None
) -> list[ClipRequest]:
    """Return requests of clips for a measurement or self-test, with example image and prompt.

    Args:
        config: Configuration whose model and sampling parameters decide which inputs are needed.
        num_clips: Number of clips, each with its own seed.
        seed: Seed of the first clip. Each further clip has the next seed.
        prompt: Prompt of all clips, if the model takes prompts; None for an example.

    Raises:
        RequestError: `prompt` is given, but the model takes no prompt.
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
            references=(last,) * sampling.num_references,
            videos={} if image is None else dict.fromkeys(sampling.videos, image),
            prompt=text if takes_prompts else None,
        )
        for clip in range(num_clips)
    ]


# --- reading of a clip's inputs -------------------------------------------------------------------


def read_input(request: ClipRequest, sampling: SamplingConfig) -> DecodedMedia | None:
    """Read and decode the images and videos that a clip is made from.

    Args:
        request: Request of the clip, with the paths of the files.
        sampling: Sampling parameters of the clip.

    Returns:
        Image; frames of a video; or, for several files, a dict of images and frames by the name of
        the input, such as `last_image`. None if the clip starts from text.

    Raises:
        InputError: A file cannot be read, or has changed since the run began.
    """
    found = {}
    for name, (path, sha256) in request.files.items():
        found[name], media_file = decode_input(read_bytes(Path(path)), Path(path), sampling, name)
        if sha256 not in (None, media_file.sha256):
            raise InputError(f"{path!r} has changed since the run began", details={"path": path})
    return found if found.keys() - {IMAGE} else found.get(IMAGE)


def decode_input(
    data: bytes, path: Path, sampling: SamplingConfig, name: str = IMAGE
) -> tuple[Image.Image | list[Image.Image], MediaFile]:
    """Decode one input file of a clip to an image or frames; return them and the file's metadata.

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
    count = (sampling.video_frames if name == IMAGE else None) or sampling.frames
    width, height = side or sampling.width, side or sampling.height
    if name not in sampling.videos and not (name == IMAGE and sampling.from_video):
        image, media_file = decode_image(data, path, MAX_PIXELS)
        check_image_shapes([media_file], sampling)
        return fit_image(image, width, height, fit), media_file
    frames, size = [], (0, 0)
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        for frame in decode_video(data, file, path, count, MAX_PIXELS):
            size = frame.size
            fitted = fit_image(frame, width, height, fit)
            frames.append(fitted.resize((width, height), Image.Resampling.LANCZOS))
    return frames, MediaFile(path, hashlib.sha256(data).hexdigest(), *size)
