"""Conversion of the arguments of `generate` into jobs: images, prompts, seeds and dicts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from PIL import Image

from svdpp.config import (
    SAMPLING_CLASSES,
    ModelConfig,
    SamplingConfig,
    VideoFormat,
    params_of,
    sampling_of_model,
)
from svdpp.config.limits import require
from svdpp.driver.job_files import JobFile, JobLine
from svdpp.driver.job_lines import JobLineReader, LineDefaults, raise_line_errors
from svdpp.driver.run_job import RunJob, combine_jobs
from svdpp.errors import InputError, nearest
from svdpp.media.images import MediaFile
from svdpp.media.inputs import ClipInput, collect_inputs, raise_problems
from svdpp.models.checkpoint import Checkpoint

#: Image as an argument of `generate`: the path of a file, or a PIL image.
ImageSource: TypeAlias = str | os.PathLike[str] | Image.Image
#: Input of a clip as an argument of `generate`: an image, or a dict with the same fields as a line
#: of a jobs file.
ClipSource: TypeAlias = ImageSource | Mapping[str, Any]


class SourceReader:
    """Converter of the arguments of `generate` into jobs.

    Args:
        model: Model of the clips.
        checkpoint: Checkpoint of the model; only its configs are read.
        parameters: Sampling parameters, by their names in jobs files (`steps`) or by the names of
            fields (`num_inference_steps`).
        format: Format of the clips.
        folder: Folder to which PIL images are saved, because ranks read image files.
    """

    def __init__(
        self,
        model: ModelConfig,
        checkpoint: Checkpoint,
        parameters: Mapping[str, Any],
        *,
        format: VideoFormat,
        folder: Path,
    ) -> None:
        self._model, self._checkpoint = model, checkpoint
        self._values = _by_field_name(parameters, checkpoint.family)
        self._format: VideoFormat = format
        self._folder = folder
        self._saved: dict[int, str] = {}

    def jobs(
        self,
        inputs: ClipSource | Iterable[ClipSource],
        prompts: str | Iterable[str] | None,
        negative_prompt: str | None,
        seeds: int | Iterable[int] | None,
    ) -> list[RunJob]:
        """Return a job for each dict, or for each combination of image, prompt and seed.

        Args:
            inputs: Images, or paths of images, folders and glob patterns. Or dicts, each with the
                fields of one clip. Among dicts, an image stands for a dict with only this image.
                Empty: the clips are made from prompts only.
            prompts: Prompts that each image is combined with; None: clips have no prompts.
            negative_prompt: Text that describes what clips with a prompt must not show; None: no
                such text.
            seeds: Seeds that each image and prompt is combined with; None: the seed 0.

        Raises:
            RequestError: Arguments contradict each other, or fields of dicts are wrong.
            InputError: Images cannot be read.
        """
        sources = _listed(inputs)
        if not any(isinstance(source, Mapping) for source in sources):
            all_seeds = [0] if seeds is None else _listed(seeds)
            return self._combine(sources, _listed(prompts), negative_prompt, all_seeds)
        is_product = prompts is not None or seeds is not None
        wrong = "`prompts` and `seeds` cannot be combined with dicts: each dict is one clip"
        require(not is_product, wrong, "write the prompt and the seed of each clip into its dict")
        return self._read(sources, negative_prompt)

    def sampling(self, *, from_image: bool) -> SamplingConfig:
        """Return the sampling parameters of `generate`'s caller, with the family's defaults.

        Some fields are still None, because their defaults are in the model's configs.

        Args:
            from_image: Whether clips start from an image, for families where an image is optional.

        Raises:
            RequestError: A parameter is out of range.
        """
        return sampling_of_model(
            self._model.name,
            self._checkpoint.family,
            self._values,
            from_image=from_image,
            memory_opt=self._model.memory_opt,
        )

    def _combine(
        self,
        images: Sequence[ImageSource],
        prompts: Sequence[str],
        negative_prompt: str | None,
        seeds: Sequence[int],
    ) -> list[RunJob]:
        nothing = "there is neither an image nor a prompt"
        require(bool(images or prompts), nothing, 'write for example generate("photo.jpg")')
        files: list[MediaFile | None] = [None]
        if images:
            paths = [self._path(image, index) for index, image in enumerate(images)]
            frames = self.sampling(from_image=True).video_frames
            found, problems = collect_inputs(paths, video_frames=frames)
            raise_problems(problems)
            files = [*found]
        texts: list[str | None] = [*prompts] or [None]
        inputs = [ClipInput(file, text, negative_prompt) for file in files for text in texts]
        return combine_jobs(inputs, seeds)

    def _read(self, clips: Sequence[ClipSource], negative_prompt: str | None) -> list[RunJob]:
        checkpoint = self._checkpoint
        has_images = checkpoint.image_use != "refused"
        defaults = LineDefaults(
            model=self._model.name,
            sampling=self.sampling(from_image=has_images),
            image_use=checkpoint.image_use,
            prompt_use=checkpoint.prompt_use,
            last_image_use=checkpoint.last_image_use,
            last_image_reason=checkpoint.last_image_reason,
            negative_prompt=negative_prompt,
            format=self._format,
        )
        fields = [self._fields(clip, index) for index, clip in enumerate(clips)]
        reader = JobLineReader(defaults, _Dicts(clips=fields))
        jobs, errors = reader.read(reader.file.lines())
        raise_line_errors(errors, reader.file, len(jobs))
        return jobs

    def _fields(self, clip: ClipSource, index: int) -> dict[str, Any]:
        if not isinstance(clip, Mapping):
            clip = {"image": clip}
        return {str(name): self._plain(value, index) for name, value in clip.items()}

    def _plain(self, value: Any, index: int) -> Any:
        """Convert a value of a caller's dict: an image or a `Path` becomes the text of its path."""
        if isinstance(value, list | tuple):
            return [self._plain(each, index) for each in value]
        return self._path(value, index) if isinstance(value, os.PathLike | Image.Image) else value

    def _path(self, image: ImageSource, index: int) -> str:
        """Return the path of a caller's image. A PIL image is saved to a file, but only once."""
        if isinstance(image, str | os.PathLike):
            return os.fspath(image)
        kind = type(image).__name__
        wrong = f"{input_label(index)} must be a path, a PIL image or a dict, got {kind}"
        require(isinstance(image, Image.Image), wrong, index=index)
        if id(image) not in self._saved:
            name = Path(getattr(image, "filename", "") or "image").stem
            path = self._folder / str(len(self._saved)) / f"{name}.png"
            path.parent.mkdir()
            _as_png(image, index).save(path, compress_level=1)
            self._saved[id(image)] = str(path)
        return self._saved[id(image)]


def _listed(values: Any) -> list[Any]:
    """Return an argument of `generate` as a list; a single value becomes a list of one."""
    if values is None:
        return []
    is_one = isinstance(values, str | os.PathLike | Image.Image | Mapping | int)
    return [values] if is_one else list(values)


@dataclass(frozen=True, kw_only=True)
class _Dicts(JobFile):
    """Stand-in for a jobs file: its lines are the dicts that the caller gave to `generate`."""

    name: str = "inputs"
    folder: Path = Path()
    kind: str = ""
    text: str = ""
    clips: Sequence[Mapping[str, Any]] = ()

    def lines(self) -> Iterator[JobLine]:
        return (JobLine(number, fields) for number, fields in enumerate(self.clips))

    def line_label(self, line: int, field: str | None = None) -> str:
        return input_label(line) + ("" if field is None else f", {field}")


def input_label(index: int) -> str:
    """Return the name of an input of `generate` in messages, such as "inputs[0]"."""
    return f"inputs[{index}]"


def _by_field_name(parameters: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return sampling parameters with keys such as `steps` replaced by names of fields.

    Args:
        parameters: Parameters by the names in jobs files (`steps`) or by the names of fields
            (`num_inference_steps`).
        family: Family of the model.

    Raises:
        RequestError: A name is unknown, or two names mean the same parameter.
    """
    kind: Any = SAMPLING_CLASSES[family]
    names = {"fit": "fit"}
    for name, param in params_of(kind).items():
        names |= {name: name, param.field: name}
    values: dict[str, Any] = {}
    for typed, value in parameters.items():
        hint = nearest(typed, (*names, *_ARGUMENTS), f"svdpp models {family} lists the parameters")
        unknown = f"{typed!r} is neither an argument of generate nor a parameter of {family}"
        require(typed in names, unknown, hint, parameter=typed, family=family)
        name = names[typed]
        require(
            name not in values,
            f"{typed!r} is another name of a parameter that is already given",
            parameter=typed,
        )
        values[name] = value
    return values


#: Arguments of `generate` that are not sampling parameters. Hints suggest them for misspelt names.
_ARGUMENTS = ("inputs", "prompts", "negative_prompt", "seeds", "model", "world_size", "device")


def _as_png(image: Image.Image, index: int) -> Image.Image:
    """Return a copy of an image in a mode that PNG supports, with equal colours and no metadata.

    A rotation in EXIF metadata is ignored; diffusers' pipelines ignore it too.
    """
    if image.mode in ("F", "I"):
        raise InputError(
            f"{input_label(index)} has 32-bit grey levels, for which white is not defined",
            "convert the image to mode L",
            details={"index": index, "bits": 32},
        )
    if image.mode.startswith("I;16"):
        copy = image.copy()
    else:
        has_alpha = image.mode in _WITH_ALPHA or "transparency" in image.info
        copy = image.convert("RGBA" if has_alpha else "RGB")
    copy.info = {}
    return copy


_WITH_ALPHA = ("RGBA", "LA", "PA", "La", "RGBa")
