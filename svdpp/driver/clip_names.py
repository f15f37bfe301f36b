"""File names of a run's clips: each job gets a unique name."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from svdpp.config import SamplingConfig, VideoFormat
from svdpp.config.limits import require, shown
from svdpp.config.sampling import params_by_field
from svdpp.driver.run_job import RunJob, job_key
from svdpp.errors import RequestError, nearest, without_controls
from svdpp.media import video
from svdpp.media.prompts import slugify_prompt

# File systems limit the length of a file name in bytes. A name of `_UNIQUE_BYTES` bytes leaves room
# for a seed and a suffix. A name of `_NUMBERED_BYTES` bytes also leaves room for a number such as
# `-2`, which makes the name unique.
_UNIQUE_BYTES = video.MAX_NAME_BYTES - len("_9223372036854775807.webp")
_NUMBERED_BYTES = _UNIQUE_BYTES - len("-100000")
#: Names of files that each run writes. A clip cannot have these names.
_OWN_NAMES = ("run.json", "clips.jsonl")
_OTHER_NAME = "give a folder as `out` for several clips"
#: Beginning and end of a clip's name, such as `cat` and `_7`. A number that makes the name unique
#: is inserted between the two: `cat-2_7`.
_Parts = tuple[str, str]


def name_jobs(
    jobs: Sequence[RunJob],
    *,
    single_clip: str = "",
    template: NameTemplate | None = None,
    recorded: Mapping[str, Sequence[str]] | None = None,
) -> list[RunJob]:
    """Return copies of the jobs, each with a unique file name for its clip, without a suffix.

    If the user gave a name, as `out` or by a template, that name is used. Otherwise the name
    consists of the image's name (or the first words of the prompt) and the seed, such as `cat_7`.
    If a run without a jobs file combines an image with several prompts, words of the prompt follow
    the image's name. If a name occurs again, the second clip gets `-2`, the third `-3`, and so on.
    A job that an earlier run has named keeps its name.

    Args:
        jobs: Jobs of the run.
        single_clip: Name of the run's only clip; empty: each job gets its own name.
        template: Template of the names; None: names are made as described above.
        recorded: Names that an earlier run gave to its clips, by `job_key` (a hash of a job's
            inputs and parameters). None: there was no earlier run.

    Raises:
        RequestError: Two jobs have the same `out`, or several jobs have the name `single_clip`.
    """
    if single_clip:
        named = [replace(job, name=single_clip) for job in jobs]
        _check_no_two(named)
        return named
    wanted = _wanted_parts(jobs, template)
    names = [job.out for job in jobs]
    _check_no_two([replace(job, name=job.out) for job in jobs if job.out])
    taken = {*names} - {""}
    if recorded:
        _keep_recorded(jobs, wanted, recorded, names, taken)
    reserved = {first + end for (first, end), name in zip(wanted, names, strict=True) if not name}
    owned, numbers = set[str](), dict[_Parts, int]()
    for index, parts in enumerate(wanted):
        if names[index]:
            continue
        first, end = parts
        name, number = first + end, numbers.get(parts, 0) + 1
        if number == 1 and name not in taken and name not in owned:
            owned.add(name)
        else:
            number = max(number, 2)
            first = _beginning(first, _NUMBERED_BYTES)
            while (name := f"{first}-{number}{end}") in taken or name in reserved:
                number += 1
            taken.add(name)
        numbers[parts] = number
        names[index] = name
    return [replace(job, name=name) for job, name in zip(jobs, names, strict=True)]


def _check_no_two(named: Iterable[RunJob]) -> None:
    owners: dict[str, RunJob] = {}
    for job in named:
        other = owners.setdefault(job.name, job)
        if other is not job:
            raise RequestError(
                f"{other} and {job} would both get the name {job.name!r}",
                "give each clip its own `out`" if job.out else _OTHER_NAME,
                details={
                    **{"output": job.name, "seed": job.seed, "other_seed": other.seed},
                    **{"line": job.line, "other_line": other.line},
                },
            )


def _wanted_parts(jobs: Sequence[RunJob], template: NameTemplate | None) -> list[_Parts]:
    prompts: dict[Path, set[str | None]] = {}
    for job in jobs if template is None else ():
        if job.line is None and job.made_from.media_file is not None:
            prompts.setdefault(job.made_from.media_file.path, set()).add(job.made_from.prompt)
    several = {path for path, texts in prompts.items() if len(texts) > 1}
    wanted = []
    for index, job in enumerate(jobs):
        if template is not None:
            wanted.append((_clean_name(template.render(job, index)), ""))
            continue
        made_from = job.made_from
        name = made_from.name
        if made_from.media_file is not None and made_from.media_file.path in several:
            name += f"-{slugify_prompt(made_from.prompt or '') or 'prompt'}"
        wanted.append((_clean_name(name), f"_{job.seed}"))
    return wanted


def _keep_recorded(
    jobs: Sequence[RunJob],
    wanted: Sequence[_Parts],
    recorded: Mapping[str, Sequence[str]],
    names: list[str],
    taken: set[str],
) -> None:
    """Give each job without a name the name that an earlier run gave to an equal job.

    Jobs are equal if they have the same `job_key` (a hash of a job's inputs and parameters). A name
    is reused only if it is the name in `wanted`, with or without a number such as `-2`.

    Args:
        jobs: Jobs of the run.
        wanted: Name that each job would get without the earlier run, as beginning and end.
        recorded: Names that the earlier run gave, by `job_key`.
        names: Name of each job, empty if the job has none yet. Reused names are written here.
        taken: All names that are in use. Reused names are added.
    """
    left = {key: list(reversed(each)) for key, each in recorded.items()}
    for index, job in enumerate(jobs):
        if names[index] or not (known := left.get(job_key(job))):
            continue
        name, (first, end) = known.pop(), wanted[index]
        numbered = re.escape(_beginning(first, _NUMBERED_BYTES)) + r"-\d+" + re.escape(end)
        if name not in taken and (name == first + end or re.fullmatch(numbered, name)):
            names[index] = name
            taken.add(name)


def _clean_name(name: str) -> str:
    """Return a clip's name without control characters and slashes, cut to `_UNIQUE_BYTES`."""
    return _beginning(without_controls(name).replace("/", "_"), _UNIQUE_BYTES)


def _beginning(name: str, num_bytes: int) -> str:
    name = name[:num_bytes]
    while len(name.encode("utf-8", "surrogatepass")) > num_bytes:
        name = name[:-1]
    return name


def check_out_name(text: str, format: VideoFormat) -> str:
    """Check a clip's name that a user gave, and return it without the suffix of the format.

    Args:
        text: Name of the file, with or without the suffix.
        format: Format of the clips.

    Raises:
        RequestError: The text is not the name of a file without folders, or it has the suffix of
            another format.
    """
    suffix = video.FORMAT_SUFFIXES[format]
    is_name = bool(text.strip()) and not re.search(r"[/\x00-\x1f\x7f]", text)
    wrong = f"must be the name of a file, without folders, got {shown(text)}"
    require(
        is_name and not text.startswith("."), wrong, "use a name such as cat.mp4", value=text[:60]
    )
    ending = Path(text).suffix.lower()
    if suffix and ending == suffix:
        text = text[: -len(suffix)]
    elif ending in video.FORMAT_SUFFIXES.values() and ending:
        wrong = f"ends in {ending}, but the format of the clips is {format}"
        raise RequestError(wrong, f"leave the suffix out, or use `format` {ending[1:]}")
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    wrong = f"is {num_bytes} bytes long, but at most {_UNIQUE_BYTES} bytes are allowed"
    require(num_bytes <= _UNIQUE_BYTES, wrong, bytes=num_bytes, highest=_UNIQUE_BYTES)
    require(text not in _OWN_NAMES, f"cannot be {text!r}: the run writes a file of this name")
    return text


#: Fields of a template that every job has, each with a sample value to test a template's format.
_JOB_FIELDS: Mapping[str, Any] = {
    **{"stem": "cat", "prompt": "a-cat", "seed": 7, "index": 1, "line": 1},
    **{"width": 8, "height": 8, "size": "8x8", "fit": "stretch"},
}


class NameTemplate:
    """Template of the file names of clips, such as `{stem}-{seed}-{index:04}`.

    Args:
        text: Template in the syntax of Python's `str.format`. Its fields are plain names, without
            attributes or indices.
        sampling: Default sampling parameters, for jobs without sampling parameters.

    Raises:
        RequestError: The text is not a valid template, contains a slash, or names a field that jobs
            do not have.
    """

    def __init__(self, text: str, sampling: SamplingConfig) -> None:
        self._text, self._sampling = text, sampling
        self._params = params_by_field(type(sampling))
        examples = dict(_JOB_FIELDS) | {
            name: param.kind(param.lowest) for name, param in self._params.items()
        }
        wrong = f"`name` {text!r} is not a valid template"
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise RequestError(
                f"{wrong}: {error}", "write for example `name` {stem}-{seed}"
            ) from error
        self._used = {field for _, field, _, _ in parts if field is not None}
        for literal, field, spec, conversion in parts:
            has_folder = "/" in literal or "\0" in literal
            require(not has_folder, f"`name` {text!r} names a folder", "give the folder as `out`")
            if field is None:
                continue
            known = ", ".join(sorted(examples))
            if field not in examples:
                unknown = f"`name` has the unknown field {{{field}}}"
                hint = nearest(field, examples)
                fields = f"the fields are {known}"
                details = {"name": text, "unknown": field, "known": sorted(examples)}
                raise RequestError(unknown, f"{hint} {fields}".strip(), details=details)
            is_short = all(len(number) <= 2 for number in re.findall(r"\d+", spec or ""))
            require(is_short and not conversion, f"{wrong}: {{{field}:{spec}}} is not allowed")
            try:
                format(examples[field], spec or "")
            except ValueError as error:
                raise RequestError(f"{wrong}: {{{field}:{spec}}}: {error}") from error
        require(
            bool(self._used),
            f"{wrong}: it contains no field",
            "write for example `name` {stem}-{seed}",
        )

    def render(self, job: RunJob, index: int) -> str:
        """Fill the template with the values of a job, and return the name of the job's clip.

        Args:
            job: Job of the clip.
            index: Position of the job among the jobs of the run, from 0. In names, positions begin
                at 1.

        Raises:
            RequestError: The name is empty or begins with a dot, or the template uses a field whose
                value is not known before the model is read.
        """
        sampling, made_from = job.sampling or self._sampling, job.made_from
        media_file, prompt = made_from.media_file, slugify_prompt(made_from.prompt or "")
        values: dict[str, Any] = {
            "stem": made_from.name if media_file is None else media_file.path.stem,
            "prompt": prompt,
            "seed": job.seed,
            "index": index + 1,
            "line": index + 1 if job.line is None else job.line,
            "width": sampling.width,
            "height": sampling.height,
            "size": f"{sampling.width}x{sampling.height}",
            "fit": sampling.fit,
            **{field: getattr(sampling, param.name) for field, param in self._params.items()},
        }
        unknown = sorted(field for field in self._used if values[field] is None)
        wrong = (
            f"`name` uses values that are unknown before the model is read: {', '.join(unknown)}"
        )
        require(not unknown, wrong, "give their values as options")
        name = self._text.format(**values)
        is_name = bool(name.strip()) and not name.startswith(".")
        require(
            is_name,
            f"`name` {self._text!r} makes the name {name!r}, which is empty or begins with a dot",
            "begin the name with a letter",
        )
        return name
