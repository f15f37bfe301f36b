"""Conversion of the lines of a jobs file into jobs.

The fields of a line have the same names as in HTTP requests to a server. A wrong line does not end
the conversion: the errors of all lines are collected, each with its line and field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from svdpp.config import (
    Fit,
    Lora,
    Param,
    PromptedSampling,
    SamplingConfig,
    VideoFormat,
    parse_loras,
)
from svdpp.config.families.registry import (
    LAST_IMAGE_FAMILIES,
    REFERENCE_FAMILIES,
    check_references,
)
from svdpp.config.limits import (
    MAX_FRAMES,
    MAX_SEED,
    MAX_SIDE,
    check_int,
    detail_value,
    is_number,
    shown,
)
from svdpp.config.pipeline import LAST_IMAGE, REFERENCES, check_prompt
from svdpp.config.sampling import SHARED, as_whole, frames_of_seconds, params_by_field
from svdpp.driver.clip_names import check_out_name
from svdpp.driver.job_files import JobFile, JobLine
from svdpp.driver.run_job import RunJob
from svdpp.errors import InputError, RequestError, SvdppError, nearest, pluralize, write_fields
from svdpp.media.images import MAX_PIXELS, MediaFile, read_image
from svdpp.media.inputs import ClipInput
from svdpp.media.video_frames import probe_video
from svdpp.models.checkpoint import InputUse

#: Fields that only HTTP requests may have, each with advice for the user of a jobs file.
_OF_SERVERS: Mapping[str, str] = {
    "model": "give `model` as an option: it is the same for all clips",
    "user": "is only for servers: leave the field out",
    "priority": "is only for servers: clips are made in the order of the lines",
    "callback_url": "is only for servers: leave the field out",
    "decode_chunk_size": "give `decode_chunk_size` as an option: it is the same for all clips",
}
#: Maximum number of errors in the message about a jobs file. The error's `details` list all errors.
MAX_PRINTED = 20


@dataclass(frozen=True, kw_only=True)
class LineDefaults:
    """Defaults for fields that a jobs file's line leaves out, and the inputs that the model takes.

    Each field `..._use` says whether a line needs, may have, or must not have this input.
    """

    model: str
    """Name of the model, for messages."""
    sampling: SamplingConfig
    """Sampling parameters, not yet resolved with the model's defaults. A line can override each
    value."""
    image_use: InputUse = "needed"
    prompt_use: InputUse = "refused"
    last_image_use: InputUse = "refused"
    last_image_reason: str = ""
    """Reason, for an error message, why this model takes no last image although other models of its
    family take one; otherwise empty."""
    seed: int = 0
    negative_prompt: str | None = None
    last_image: str | None = None
    """Path, relative to the working folder, of the image for the last frame. Only clips that
    start from an image get it. None: there is no default."""
    references: tuple[str, ...] = ()
    """Paths, relative to the working folder, of the reference images. Only clips that start
    from an image get them."""
    videos: Mapping[str, str] = field(default_factory=dict)
    """Paths, relative to the working folder, of additional input videos, by field name."""
    format: VideoFormat = "mp4"
    max_pixels: int = MAX_PIXELS


class JobLineReader:
    """Converter of the lines of a jobs file into jobs. Each image is read only once.

    Args:
        defaults: Values for fields that lines do not set.
        file: Jobs file of the lines. Messages name it, and relative paths refer to its folder.
    """

    def __init__(self, defaults: LineDefaults, file: JobFile) -> None:
        self._defaults, self.file = defaults, file
        self._kind: Any = type(defaults.sampling)
        self._params: Mapping[str, Param] = params_by_field(self._kind)
        self._samplings: dict[tuple[Any, ...], SamplingConfig] = {}
        self._files: dict[tuple[str, int | None], MediaFile | InputError] = {}
        self._owners: dict[str, int] = {}
        self._errors: list[SvdppError] = []
        self._line = 0

    def read(self, lines: Iterable[JobLine | SvdppError]) -> tuple[list[RunJob], list[SvdppError]]:
        """Return the jobs of a jobs file's valid lines, and the errors of the other lines.

        Args:
            lines: Lines of the file. A line that could not be parsed is replaced by an error.
        """
        jobs, errors = list[RunJob](), list[SvdppError]()
        for line in lines:
            if isinstance(line, SvdppError):
                errors.append(line)
                continue
            self._errors = []
            job = self._read_line(line)
            errors += self._errors
            if job is not None and not self._errors:
                jobs.append(job)
        return jobs, errors

    # --- names of fields in a line --------------------------------------------------------------

    @cached_property
    def image_field(self) -> str:
        """Jobs file field for a clip's input: `image`, or `video` if the family edits videos."""
        return "video" if self._kind.from_video else "image"

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """Names of all fields that lines of a jobs file may have for the model's family."""
        prompts = () if self._defaults.prompt_use == "refused" else ("prompt", "negative_prompt")
        image = () if self._defaults.image_use == "refused" else (self.image_field, "fit")
        last_image = () if self._defaults.last_image_use == "refused" else (LAST_IMAGE,)
        references = (REFERENCES,) if self._kind.family in REFERENCE_FAMILIES else ()
        images = (*image, *last_image, *references)
        more = ("seed", "size", "width", "height", "seconds", "lora", "out")
        return (*images, *self._kind.videos, *prompts, *more, *self._params)

    @cached_property
    def _aliases(self) -> dict[str, str]:
        """Map of a jobs file's aliases to field names, such as `num_inference_steps` to `steps`."""
        aliases = {param.name: name for name, param in self._params.items() if param.name != name}
        for name in ("image", "input_reference", "image_reference"):
            if name != self.image_field and self.image_field in self.fields:
                aliases[name] = self.image_field
        return aliases

    @cached_property
    def _names_in_file(self) -> dict[str, str]:
        """Map of names in configurations to names in jobs files, like `num_frames` to `frames`."""
        return {
            **{param.name: name for name, param in self._params.items()},
            **{name: name for name in ("width", "height", "seed", "fit", "prompt", LAST_IMAGE)},
            **{REFERENCES: REFERENCES, "negative_prompt": "negative_prompt", "loras": "lora"},
        }

    # --- conversion of one line to a job --------------------------------------------------------

    def _read_line(self, line: JobLine) -> RunJob | None:
        self._line = line.number
        values = self._known_values(line.fields)
        with self._errors_of("out"):
            out = self._out(values.get("out"))
        with self._errors_of("seed"):
            seed = self._seed(values.get("seed"))
        with self._errors_of("lora"):
            loras = self._loras(values.get("lora"))
        with self._errors_of("prompt"):
            prompt = self._text("prompt", values.get("prompt"))
        with self._errors_of("negative_prompt"):
            negative = self._text("negative_prompt", values.get("negative_prompt"))
        image = self._given_path(self.image_field, values, self._defaults.image_use)
        if self._defaults.prompt_use == "needed" and "prompt" not in values:
            self._add("is missing", 'say what happens, as in "a wave"', "prompt")
        last_default = None if image is None else self._defaults.last_image
        last_image = self._given_path(
            LAST_IMAGE, values, self._defaults.last_image_use, last_default
        )
        references = () if image is None else self._defaults.references
        with self._errors_of(REFERENCES):
            references = self._references(values.get(REFERENCES)) or references
        sampling = self._sampling(
            values,
            has_image=image is not None,
            has_last_image=last_image is not None,
            num_references=len(references),
        )
        videos = {
            name: self._given_path(name, values, "needed", self._defaults.videos.get(name))
            for name in self._kind.videos
        }
        media_file, further = None, list[tuple[str, MediaFile | None]]()
        if image is not None and (sampling is not None or not self._kind.from_video):
            frames = None if sampling is None else sampling.video_frames
            media_file = self._media(self.image_field, image, frames)
        last_file = None if last_image is None else self._media(LAST_IMAGE, last_image, None)
        found_references = [self._media(REFERENCES, path, None) for path in references]
        if sampling is None:
            return None
        for name, path in videos.items():
            if path is not None:
                further.append((name, self._media(name, path, sampling.frames)))
        if negative is None:
            negative = self._defaults.negative_prompt
        found = tuple((name, file) for name, file in further if file is not None)
        images = tuple(file for file in found_references if file is not None)
        made_from = ClipInput(media_file, prompt, negative, found, last_file, loras, images)
        return RunJob(made_from=made_from, seed=seed, sampling=sampling, out=out, line=line.number)

    def _known_values(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that a jobs file's line sets, by field; record errors of wrong fields.

        Empty strings and null are skipped.
        """
        values: dict[str, Any] = {}
        typed_names: dict[str, str] = {}
        for typed, value in fields.items():
            name = self._aliases.get(typed, typed)
            if value is None or value == "":
                continue
            if name not in self.fields:
                self._refuse_field(typed)
            elif name in values:
                wrong = f"is the same field as {typed_names[name]}, which the line has too"
                self._add(wrong, "give only one of the two", typed)
            else:
                values[name], typed_names[name] = value, typed
        return values

    def _refuse_field(self, name: str) -> None:
        model, is_of_prompts = self._defaults.model, name in ("prompt", "negative_prompt")
        if name in _OF_SERVERS:
            self._add(_OF_SERVERS[name], "", name)
        elif is_of_prompts:
            self._add(f"model {model!r} takes no prompt", "leave it out", name)
        elif name in ("image", "input_reference", "image_reference", "fit"):
            self._add(f"model {model!r} takes no image", "leave it out", name)
        elif name == LAST_IMAGE:
            reason = self._defaults.last_image_reason
            families = f"these families take one: {', '.join(LAST_IMAGE_FAMILIES)}"
            self._add(f"model {model!r} takes no last image", reason or families, name)
        elif name == REFERENCES:
            families = f"these families take references: {', '.join(REFERENCE_FAMILIES)}"
            self._add(f"model {model!r} takes no references", families, name)
        else:
            hint = nearest(name, (*self.fields, *self._aliases), "")
            self._add("is unknown", hint or f"the fields are {', '.join(self.fields)}", name)

    def _out(self, value: Any) -> str:
        text = self._text("out", value)
        if text is None:
            return ""
        name = check_out_name(text, self._defaults.format)
        other = self._owners.setdefault(name, self._line)
        if other != self._line:
            raise RequestError(
                f"{name!r} is also the name in line {other}",
                "give each clip its own name",
                details={"other_line": other},
            )
        return name

    def _seed(self, value: Any) -> int:
        if value is None:
            return self._defaults.seed
        seed = _number(value, int)
        check_int("seed", seed, 0, MAX_SEED)
        return int(seed)

    def _loras(self, value: Any) -> tuple[Lora, ...]:
        """Return the LoRAs of a jobs file's line. Relative paths refer to the file's folder."""
        loras = []
        for lora in parse_loras(value):
            path = self.file.folder / lora.name
            loras.append(replace(lora, name=str(path)) if path.exists() else lora)
        return tuple(loras)

    def _references(self, value: Any) -> tuple[str, ...]:
        """Return the paths of the reference images that a line of a jobs file names.

        Args:
            value: One path, a list of paths, or such a list as JSON text, as in a CSV file.
        """
        if value is None:
            return ()
        listed = value
        if isinstance(value, str):
            listed = _json_value(value) if value.lstrip().startswith("[") else [value]
        if not (isinstance(listed, list | tuple) and all(isinstance(each, str) for each in listed)):
            raise RequestError(
                f"must be a list of files, got {shown(value)}",
                f'write {REFERENCES}: ["a.jpg", "b.jpg"]',
                details={"value": detail_value(value)},
            )
        check_references(self._kind.family, len(listed))
        return tuple(str(self.file.folder / path) for path in listed)

    def _text(self, name: str, value: Any) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str):
            raise RequestError(
                f"must be a string, got {shown(value)}",
                "put it into quotes",
                details={"value": detail_value(value)},
            )
        if name != "out":
            check_prompt(name, value)
        return value

    def _given_path(
        self, name: str, values: Mapping[str, Any], use: InputUse, default: str | None = None
    ) -> str | None:
        value = values.get(name)
        if value is None:
            if default is not None:
                return default
            if use == "needed":
                self._add("is missing", f"give {name} in each line: the model needs it", name)
            return None
        if not isinstance(value, str):
            wrong = f"must be the name of a file, got {shown(value)}"
            value = detail_value(value)
            self._errors.append(self.file.error(self._line, wrong, "", name, value=value))
            return None
        return str(self.file.folder / value)

    # --- sampling parameters of a line ----------------------------------------------------------

    def _sampling(
        self,
        values: Mapping[str, Any],
        *,
        has_image: bool,
        has_last_image: bool,
        num_references: int,
    ) -> SamplingConfig | None:
        """Return the sampling parameters of a jobs file's line; None if the line has an error.

        Lines with equal parameters share one object.
        """
        changes: dict[str, Any] = {}
        for name, param in self._params.items():
            if name in values:
                with self._errors_of(name):
                    changes[param.name] = _number(values[name], param.kind)
                    param.check(changes[param.name])
        with self._errors_of("size"):
            changes |= self._size(values)
        for name in ("width", "height"):
            if name in values:
                with self._errors_of(name):
                    changes[name] = _number(values[name], int)
                    SHARED[name].check(changes[name])
        if "fit" in values:
            changes["fit"] = values["fit"]
            if values["fit"] not in get_args(Fit):
                self._add(f"must be one of {', '.join(get_args(Fit))}", "", "fit")
        with self._errors_of("seconds"):
            self._set_frames_of_seconds(values, changes)
        if issubclass(self._kind, PromptedSampling):
            changes |= {"from_image": has_image, "has_last_image": has_last_image}
            changes["num_references"] = num_references
        if self._errors:
            return None
        key = tuple(sorted(changes.items()))
        if key not in self._samplings:
            with self._errors_of(None):
                self._samplings[key] = replace(self._defaults.sampling, **changes)
        return self._samplings.get(key)

    def _size(self, values: Mapping[str, Any]) -> dict[str, int]:
        if "size" not in values:
            return {}
        if "width" in values or "height" in values:
            raise RequestError("cannot be given with width or height", "leave size out")
        text = values["size"]
        width, _, height = text.partition("x") if isinstance(text, str) else ("", "", "")
        is_size = all(
            side.isascii() and side.isdigit() and len(side) < 6 for side in (width, height)
        )
        if not is_size:
            raise RequestError(
                f"must be WIDTHxHEIGHT, got {shown(text)}", "write a size such as 832x480"
            )
        sides = {"width": int(width), "height": int(height)}
        for name, side in sides.items():
            check_int(name, side, 1, MAX_SIDE)
        return sides

    def _set_frames_of_seconds(self, values: Mapping[str, Any], changes: dict[str, Any]) -> None:
        if "seconds" not in values:
            return
        if "frames" in values:
            raise RequestError("cannot be given with frames", "give only one of the two")
        seconds = _number(values["seconds"], float)
        if not 0 < seconds <= MAX_FRAMES:
            wrong = f"must be above 0 and at most {MAX_FRAMES}, got {shown(seconds)}"
            raise RequestError(wrong, details={"value": seconds, "highest": MAX_FRAMES})
        fps = as_whole(changes.get("fps", self._defaults.sampling.fps))
        frames = frames_of_seconds(seconds, fps, self._kind)
        if frames > MAX_FRAMES:
            raise RequestError(
                f"{seconds:g} seconds at {fps} frames per second are {frames} frames, and the "
                f"limit is {MAX_FRAMES}",
                details={
                    **{"seconds": seconds, "fps": fps, "frames": frames, "highest": MAX_FRAMES}
                },
            )
        changes["num_frames"] = frames

    # --- images and videos of a line ------------------------------------------------------------

    def _media(self, name: str, path: str, frames: int | None) -> MediaFile | None:
        key = path, frames
        if key not in self._files:
            try:
                if frames is None:
                    found = read_image(Path(path), self._defaults.max_pixels)[1]
                else:
                    found = probe_video(Path(path), frames, self._defaults.max_pixels)
                self._files[key] = found
            except InputError as error:
                self._files[key] = error
        file = self._files[key]
        if isinstance(file, MediaFile):
            return file
        place = self.file.line_label(self._line, name)
        details = {"file": self.file.name, "line": self._line, "field": name}
        self._errors.append(
            InputError(f"{place}: {file.message}", file.hint, details={**file.details, **details})
        )
        return None

    # --- errors of a line -----------------------------------------------------------------------

    @contextmanager
    def _errors_of(self, name: str | None) -> Iterator[None]:
        """Catch a `RequestError` of the `with` block; add it to the errors of the jobs file's line.

        Args:
            name: Name of the field that the error is about; None: the error itself names the field.
        """
        try:
            yield
        except RequestError as error:
            self._errors.append(self.line_error(self._line, error, name))

    def _add(self, message: str, hint: str, name: str) -> None:
        self._errors.append(self.file.error(self._line, message, hint, name))

    def line_error(self, line: int, error: SvdppError, name: str | None = None) -> RequestError:
        """Convert an error of a configuration class to an error about a line of the jobs file.

        The new error names the line, and names fields as the jobs file does: `frames`, not
        `num_frames`.

        Args:
            line: Number of the line.
            error: Error from a configuration class that was built from the line.
            name: Name of the field in the jobs file; None: the error itself names the field.
        """
        names = self._names_in_file
        if name is None and error.field is not None:
            name = names.get(error.field)
        message = write_fields(error.message, names).removeprefix(f"{name} ")
        hint = write_fields(error.hint, names)
        details = {key: value for key, value in error.details.items() if key != "field"}
        return self.file.error(line, message, hint, name, **details)


def _json_value(text: str) -> Any:
    """Return the value of JSON text in a jobs file. Text that is not JSON is returned unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _number(value: Any, kind: type[int] | type[float]) -> int | float:
    """Return the value of a jobs file's field, a JSON value or a string, as a number.

    Args:
        value: JSON value or string, such as 7 or "7".
        kind: Type of the result, int or float.

    Raises:
        RequestError: The value is not a finite number, or `kind` is int and the value is not whole,
            such as 1.5.
    """
    number, hint = value, ""
    if isinstance(value, str):
        hint = f"write {value.replace(',', '.')}" if value.count(",") == 1 else ""
        try:
            number = int(value)
        except ValueError:
            try:
                number = float(value)
            except ValueError:
                number = None
    is_whole = is_number(number) and float(number).is_integer()
    if not is_number(number) or (kind is int and not is_whole):
        what = "a whole number" if kind is int else "a number"
        got = str(value).lower() if isinstance(value, bool) else shown(value)
        wrong = f"must be {what}, got {got}"
        raise RequestError(wrong, hint, details={"value": detail_value(value)})
    return int(number) if kind is int else number


def raise_line_errors(
    errors: Sequence[SvdppError], file: JobFile, num_jobs: int, hint: str = ""
) -> None:
    """Raise the errors of a jobs file's lines as one error; do nothing if there are no errors.

    A single error is raised with `hint` added to its own hint. The message about several errors
    lists them.

    Args:
        errors: Errors of lines.
        file: Jobs file of the lines.
        num_jobs: Number of valid lines.
        hint: Additional advice for the user.

    Raises:
        InputError: All errors are about images or videos.
        RequestError: At least one error is about something else.
    """
    if not errors:
        return
    is_of_files = all(isinstance(error, InputError) for error in errors)
    kind = InputError if is_of_files else RequestError
    errors = sorted(errors, key=lambda error: error.details["line"])
    each = [{"message": error.message, "hint": error.hint, **error.details} for error in errors]
    if len(errors) == 1:
        both = "; ".join(filter(None, (errors[0].hint, hint)))
        raise kind(errors[0].message, both, details={**errors[0].details, "errors": each})
    prefix = f"{file.name}, "
    texts = [
        error.message.removeprefix(prefix) + (f" ({error.hint})" if error.hint else "")
        for error in errors
    ]
    num_lines = len({error.details["line"] for error in errors})
    all_lines = pluralize(num_jobs + num_lines, "line")
    lines = [f"{file.name}: {num_lines} of {all_lines} cannot be used:"]
    lines += texts[:MAX_PRINTED]
    if len(texts) > MAX_PRINTED:
        lines.append(f"and {len(texts) - MAX_PRINTED} more")
    details = {
        "file": file.name,
        "num_wrong_lines": num_lines,
        "num_lines": num_jobs + num_lines,
        "num_not_shown": max(0, len(texts) - MAX_PRINTED),
        "errors": each,
    }
    raise kind("\n  ".join(lines), hint, details=details)
