"""Owns a bench's configuration: YAML, overrides and grids, all checked before anything runs."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from svdpp.bench.noise import check_rounds
from svdpp.bench.sections import Measure, Model, Ranks, Section, Workload
from svdpp.bench.targets import parse_target
from svdpp.config import PipelineConfig
from svdpp.errors import InputError, RequestError, describe_fault
from svdpp.plan.small_file import read_small_file
from svdpp.redaction import recorded_name, redact_all

_SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "bench"
_MAX_GRID = 1000


class BenchConfig(Section):
    """One point of a bench's grid; every field has one value."""

    experiment: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
    """Name of the folder for its results."""
    model: Model = Model()
    pipeline: Ranks = Ranks()
    workload: Workload = Workload()
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """None: the default of --dtype."""
    measure: Measure = Measure()
    profile: bool = False
    """Whether torch.profiler profiles one clip on rank 0, in a separate run at the end."""
    targets: dict[str, str] = Field(default_factory=dict)
    """Bounds for figures of the summary, such as `overhead: "<= 1.05"`."""

    @field_validator("precision", mode="before")
    @classmethod
    def _no_autocast(cls, value: object) -> object:
        if value == "amp":
            raise ValueError(
                "amp means torch.autocast, which chooses a dtype for each kernel: neither the "
                "ranks nor the proof support it; bf16 and fp16 apply to weights and latents"
            )
        return value

    @model_validator(mode="after")
    def _targets_can_be_judged(self) -> BenchConfig:
        for name, bound in self.targets.items():
            parse_target(name, bound)
        if self.targets:
            check_rounds(self.measure.repeats, "targets need")
        return self

    def resolved(self, config: PipelineConfig) -> BenchConfig:
        """A copy with the values that depend on the machine, the model and its defaults."""
        sampling, model = config.sampling, config.model
        names = set(Workload.model_fields) & {field.name for field in fields(sampling)}
        chosen = {name: getattr(sampling, name) for name in names}
        chosen |= {"frames": sampling.num_frames, "steps": sampling.num_inference_steps}
        ranks = {"world": config.world_size, "threads": config.num_threads, "split": config.split}
        return self.model_copy(
            update={
                "pipeline": self.pipeline.model_copy(update=ranks),
                "workload": self.workload.model_copy(update=chosen),
                "precision": model.dtype,
            }
        )

    @property
    def sha256(self) -> str:
        """The hash of all fields but the name and the targets; equal for equal measurements."""
        values = self.model_dump(exclude={"experiment", "targets"})
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def to_yaml(self) -> str:
        """All fields, in the form that `read_grid` reads."""
        values = self.model_dump()
        values["model"]["name"] = recorded_name(self.model.name)
        return str(yaml.safe_dump(redact_all(values), sort_keys=False))


def shipped() -> list[str]:
    """The names of the configurations that come with svdpp."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def read_grid(name: str, overrides: Sequence[str]) -> list[BenchConfig]:
    """All points of the grid that a file and its overrides span, in the order of its lists.

    Args:
        name: a path, or the name of a configuration that comes with svdpp.
        overrides: `section.field=value`, the value in YAML; later ones win.
    """
    path = _find(name)
    content = _read(path)
    for override in overrides:
        _override(content, override)
    content.setdefault("experiment", path.stem)
    points = list(itertools.islice(_points(content), _MAX_GRID + 1))
    if len(points) > _MAX_GRID:
        raise RequestError(f"{name!r} spans more than {_MAX_GRID} points", "shorten its lists")
    return [_validated(point, name) for point in points]


def _find(name: str) -> Path:
    if Path(name).suffix in (".yaml", ".yml") or Path(name).exists():
        return Path(name)
    if name in shipped():
        return _SHIPPED / f"{name}.yaml"
    raise RequestError(
        f"{name!r} is neither a file nor a configuration that comes with svdpp",
        f"{_nearest(name, shipped())}shipped: {', '.join(shipped())}",
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = _parsed(read_small_file(path, "configuration"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        words = " ".join(str(error).split())
        raise InputError(f"{str(path)!r} is not YAML: {words}") from error
    if content is not None and not isinstance(content, dict):
        raise InputError(f"{str(path)!r} holds no sections, such as 'workload:'")
    # A section whose lines are all commented out is null: it takes its defaults.
    return {key: value for key, value in (content or {}).items() if value is not None}


def _parsed(text: str | bytes) -> Any:
    """A YAML value; aliases are refused, because a few nested ones can exhaust the memory.

    Raises:
        yaml.YAMLError: the text is not YAML, or has an alias.
    """
    for token in yaml.scan(text):
        if isinstance(token, yaml.AliasToken):
            raise yaml.YAMLError(f"alias *{token.value}: write the value out")
    return yaml.safe_load(text)


def _override(content: dict[str, Any], text: str) -> None:
    """Sets one field; creates missing sections."""
    dotted, equals, value = text.partition("=")
    if not equals or not dotted:
        raise RequestError(f"an override is section.field=value, got {text!r}")
    is_target = dotted.startswith("targets.")  # the name of a target may have a dot
    *sections, field = dotted.split(".", 1) if is_target else dotted.split(".")
    place = content
    for section in sections:
        if place.get(section) is None:
            place[section] = {}
        place = place[section]
        if not isinstance(place, dict):
            raise RequestError(f"{text!r}: {section!r} is not a section")
    try:
        place[field] = value if is_target else _parsed(value)  # YAML takes '>' for a block of text
    except yaml.YAMLError as error:
        raise RequestError(f"{text!r}: the value is not YAML") from error


def _points(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One mapping for each point: the last list varies fastest."""
    swept = [(place, value) for place, value in _leaves(content) if _is_sweep(place, value)]
    for choice in itertools.product(*(values for _, values in swept)):
        point: dict[str, Any] = json.loads(json.dumps(content, default=str))
        for (place, _), value in zip(swept, choice, strict=True):
            _set(point, place, value)
        yield point


def _leaves(content: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[Any]:
    for key, value in content.items():
        place = (*above, str(key))
        if isinstance(value, dict):
            yield from _leaves(value, place)
        else:
            yield place, value


def _is_sweep(place: tuple[str, ...], value: object) -> bool:
    """Whether `value` is a list for a field of single values; validation refuses an empty one."""
    is_single = ".".join(place) not in _LISTS and place[0] != "targets"
    return isinstance(value, list) and bool(value) and is_single


def _set(content: dict[str, Any], place: tuple[str, ...], value: object) -> None:
    for section in place[:-1]:
        content = content[section]
    content[place[-1]] = value


def _fields(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted name and annotation of every field."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, f"{above}{name}.")
        else:
            yield above + name, field.annotation


_ALL = dict(_fields(BenchConfig))
_LISTS = {name for name, annotation in _ALL.items() if str(annotation).startswith("list")}


def _validated(content: dict[str, Any], name: str) -> BenchConfig:
    try:
        return BenchConfig.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, RequestError):
            raise RequestError(f"{name}: {cause.message}", cause.hint) from error
        if first["type"] == "extra_forbidden":
            raise RequestError(f"{name}: no field {where!r}", _known(where)) from error
        raise RequestError(f"{name}: {where} {describe_fault(first)}") from error


def _known(where: str) -> str:
    """A hint: a key of the same name elsewhere, a similar key, or all keys of the section."""
    section, _, last = where.rpartition(".")
    elsewhere = [name for name in _ALL if name.rpartition(".")[2] == last]
    if elsewhere:
        return f"did you mean {elsewhere[0]!r}?"
    beside = {n.rpartition(".")[2]: n for n in _ALL if section and n.startswith(f"{section}.")}
    top = {name: name for name in sorted({name.partition(".")[0] for name in _ALL})}
    known = beside or top
    found = difflib.get_close_matches(last if beside else where.partition(".")[0], known, n=1)
    if found:
        return f"did you mean {known[found[0]]!r}?"
    return f"known: {', '.join(known.values())}"


def _nearest(word: str, words: list[str]) -> str:
    found = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {found[0]!r}? " if found else ""
