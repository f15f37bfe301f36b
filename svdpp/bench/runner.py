"""A bench: its configuration, from YAML and overrides, and its cases, measured in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from svdpp.config import (
    DEFAULT_MODEL,
    SAMPLING_CLASSES,
    ClipRequest,
    Fit,
    PipelineConfig,
    SamplingConfig,
    params_of,
)
from svdpp.config.limits import MAX_CLIPS, MAX_SEED, read_small_file
from svdpp.config.pipeline import amp_refused
from svdpp.config.sampling import PromptedSampling
from svdpp.diagnostics.figures import RunFigures, measured_figures
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.supervisor import Observer, OpenObserver, no_observer
from svdpp.driver.trace import Trace
from svdpp.errors import (
    InputError,
    OutOfMemoryError,
    RequestError,
    describe_fault,
    nearest,
    recorded_name,
    redact_all,
)
from svdpp.media.inputs import (
    EXAMPLE_PROMPT,
    ClipInput,
    Photo,
    check_inputs,
    example_photos,
    in_turn,
)
from svdpp.plan.layout import Split, present_split
from svdpp.verification.verify import run_reference

#: The case that is measured, and its two baselines.
PIPELINE, DATA_PARALLEL, ONE_DEVICE = "pipeline", "data parallel", "diffusers"

_MAX_ROUNDS = 1000
_SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "bench"

#: Not strict, because YAML 1.1 reads 1e3 as text.
Number = Annotated[float, Field(strict=False)]
Positive = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Strict: otherwise `true` and "1" would count as 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class Model(Section):
    """The weights; the fields are options of `svdpp run`."""

    name: str = DEFAULT_MODEL
    family: str | None = None
    revision: str | None = None
    variant: str | None = None
    local_files_only: bool = False
    memory_opt: bool = False
    channels_last: bool = False
    latent_shape: list[Positive] = Field(default=[1, 4, 14, 64, 64], min_length=5, max_length=5)
    """Of the dummy model: B, C, F, H, W."""


class Ranks(Section):
    """How the ranks share the work; the fields are options of `svdpp run`."""

    world: Positive | None = None
    """Number of ranks W; None: every GPU, or 2 on the CPU."""
    device: str = "cuda"
    split: Annotated[Split, BeforeValidator(present_split)] = "uniform"
    """If not given, `balanced` for a model with two experts."""
    share_experts: bool = False
    """Whether one rank may hold both experts of a model that has two."""
    replicas: Positive = 1
    decoders: Positive = 1
    cfg_parallel: Positive = 1
    costs: str | None = None
    """Costs file or preset for the split; None: svd-xt-a100."""
    threads: Positive | None = None
    """CPU threads of each rank, in every case; None: cores // ranks, on CUDA 1."""
    deterministic: bool = False
    """torch's strict mode, in every case."""
    allow_mixed_devices: bool = False
    checksum: bool = False
    timeout: Number = 600.0
    start_timeout: Number = 600.0


def _parameters() -> dict[str, Any]:
    """The sampling parameters of every family; None: the model's default."""
    short = {"num_inference_steps": "steps", "num_frames": "frames"}
    kinds: dict[type, Any] = {int: Annotated[int, Field(ge=0)], float: Number}
    return {
        short.get(name, name): (kinds[param.kind] | None, None)
        for family in SAMPLING_CLASSES
        for name, param in params_of(cast("Any", SAMPLING_CLASSES[family])).items()
    }


_Sampled: Any = create_model("_Sampled", __base__=Section, **_parameters())


class Workload(_Sampled):  # type: ignore[misc]
    """The clips to be made, with the sampling parameters of their model."""

    clips: Annotated[int, Field(ge=1, le=MAX_CLIPS)] = 8
    """Measured clips of each round, without the warm-up."""
    images: list[str] = Field(default=[])
    """Files, which the clips take in turn; empty: the four that come with svdpp, or none for a
    model that also makes clips from text."""
    prompts: list[str] | None = Field(default=None, min_length=1)
    """For a model that takes prompts: each is combined with each image. None: an example."""
    negative_prompt: str | None = None
    decode_chunk_size: Positive | None = None
    fit: Fit = "stretch"


class Measure(Section):
    """The number of rounds, the warm-up, and the seeds."""

    warmups: Annotated[int, Field(ge=0, le=_MAX_ROUNDS)] = 1
    """Clips through every rank before the measured ones, in each round."""
    repeats: Annotated[int, Field(ge=1, le=_MAX_ROUNDS)] = 3
    """Rounds; each starts the processes of every case again."""
    seeds: list[Annotated[int, Field(ge=0, le=MAX_SEED)]] = Field(default=[0], min_length=1)
    """All images take the first seed, then all take the second, and so on, in a cycle."""


def _no_amp(precision: object) -> object:
    if precision == "amp":
        raise amp_refused()
    return precision


class BenchConfig(Section):
    """What a bench measures."""

    experiment: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
    """Name of the folder for its results."""
    model: Model = Model()
    pipeline: Ranks = Ranks()
    workload: Workload = Workload()
    precision: Annotated[Literal["fp32", "bf16", "fp16"] | None, BeforeValidator(_no_amp)] = None
    """None: the default of --dtype."""
    measure: Measure = Measure()
    profile: bool = False
    """Whether torch.profiler profiles one clip on rank 0, in a separate run at the end."""

    def resolved(self, config: PipelineConfig) -> BenchConfig:
        """A copy with the values that depend on the machine, the model and its defaults."""
        sampling, model = config.sampling, config.model
        names = set(Workload.model_fields) & {each.name for each in fields(sampling)}
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

    def to_yaml(self) -> str:
        """All fields, in the form that `read_config` reads."""
        values = self.model_dump()
        values["model"]["name"] = recorded_name(self.model.name)
        return str(yaml.safe_dump(redact_all(values), sort_keys=False))


def shipped() -> list[str]:
    """The names of the configurations that come with svdpp."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def read_config(name: str, overrides: Sequence[str]) -> BenchConfig:
    """The configuration of that path or shipped name, with overrides.

    These are `section.field=value`, the value in YAML; later ones win.
    """
    path = _find(name)
    content = _read(path)
    for override in overrides:
        _override(content, override)
    content.setdefault("experiment", path.stem)
    try:
        return BenchConfig.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise RequestError(f"{name}: no field {where!r}", _known(where)) from error
        raise RequestError(f"{name}: {where} {describe_fault(first)}") from error


def _find(name: str) -> Path:
    if Path(name).suffix in (".yaml", ".yml") or Path(name).exists():
        return Path(name)
    if name in shipped():
        return _SHIPPED / f"{name}.yaml"
    raise RequestError(
        f"{name!r} is neither a file nor a configuration that comes with svdpp",
        nearest(name, shipped(), f"shipped: {', '.join(shipped())}"),
    )


def _parsed(text: str | bytes) -> Any:
    """A YAML value without aliases, a few of which, nested, could exhaust the memory."""
    if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
        raise yaml.YAMLError("aliases are not taken: write the value out")
    return yaml.safe_load(text)


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


def _override(content: dict[str, Any], text: str) -> None:
    dotted, equals, value = text.partition("=")
    if not equals or not dotted:
        raise RequestError(f"an override is section.field=value, got {text!r}")
    *sections, key = dotted.split(".")
    place = content
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise RequestError(f"{text!r}: {section!r} is not a section")
    try:
        place[key] = _parsed(value)
    except yaml.YAMLError as error:
        raise RequestError(f"{text!r}: the value is not YAML") from error


def _known(where: str) -> str:
    """A hint: a field of the same name elsewhere, a similar one, or the sections."""
    names, last = list(BenchConfig.model_fields), where.rpartition(".")[2]
    for section, about in BenchConfig.model_fields.items():
        names += [f"{section}.{name}" for name in getattr(about.annotation, "model_fields", ())]
    same = (name for name in names if name.rpartition(".")[2] == last)
    return nearest(next(same, where), names, f"known: {', '.join(BenchConfig.model_fields)}")


# --- the measurement -----------------------------------------------------------------------------


@dataclass(kw_only=True)
class Round:
    """One measured case of one round, without its warm-up."""

    case: str
    number: int
    """Of the round, from 0."""
    trace: Trace
    figures: RunFigures
    sha256: list[tuple[str, str | None]]
    """Of latents and frames, by clip."""


@dataclass
class Bench:
    """A configuration: its cases, and their measured rounds."""

    asked: BenchConfig
    config: PipelineConfig
    rounds: list[Round] = field(default_factory=list)
    out_of_memory: dict[str, OutOfMemoryError] = field(default_factory=dict)
    """The baselines that do not fit on the devices."""

    def __post_init__(self) -> None:
        self.requests = _requests(self.asked, self.config)
        self.asked = self.asked.resolved(self.config)
        self.cases = cases_of(self.config)

    def rounds_of(self, case: str) -> list[Round]:
        """The measured rounds of one case."""
        return [done for done in self.rounds if done.case == case]

    def run(
        self,
        log: Callable[[str], None],
        keep: Callable[[Round], None],
        open_observer: OpenObserver = no_observer,
    ) -> None:
        """Measures every case once in each round, which begins with another; `keep` takes each.

        A baseline's lack of memory is a result; every other error ends the bench.
        """
        names, repeats = list(self.cases), self.asked.measure.repeats
        for number, turn in product(range(repeats), range(len(names))):
            case = names[(number + turn) % len(names)]
            if case in self.out_of_memory:
                continue
            title = f"round {number + 1} of {repeats}, {case}"
            try:
                done = self._measure(case, number, title, open_observer)
            except OutOfMemoryError as error:
                if case == PIPELINE:
                    raise
                self.out_of_memory[case] = error
                log(f"{title}: {error.message}")
                continue
            self.rounds.append(done)
            keep(done)
            makespan, first = done.figures.makespan, done.figures.first_clip
            log(f"{title}: makespan {makespan:.2f} s, first clip after {first:.2f} s")

    def profile(self, path: Path) -> None:
        """Makes a clip in a run of its own, of which torch.profiler writes a trace."""
        with Pipeline(self.config, profile_path=str(path.absolute())) as pipeline:
            pipeline.run(self.requests[:2])

    def _measure(self, case: str, number: int, title: str, open_observer: OpenObserver) -> Round:
        config = self.cases[case]
        # This many clips reach every rank: all replicas, and all decoders of each.
        num_routes = 1 if case == ONE_DEVICE else config.replicas * config.decoders
        num_warmups = self.asked.measure.warmups * num_routes
        warmups = [self.requests[i % len(self.requests)] for i in range(num_warmups)]
        clips = [*warmups, *self.requests]
        trace = Trace(config.world_size, first_clip=num_warmups)
        schedule = config.layout.schedule(len(clips))
        with open_observer(title, schedule) as progress:
            observers: list[Observer] = [trace, progress]
            if case == ONE_DEVICE:
                made = run_reference(config, clips, observers=observers)[num_warmups:]
            else:
                pipeline = Pipeline(config)
                for observer in observers:
                    pipeline.observe(observer)
                with pipeline:
                    if warmups:
                        pipeline.run(warmups)
                    made = [result.metadata for result in pipeline.run(self.requests)]
        figures = measured_figures(trace, config, config.layout.schedule(len(self.requests)))
        assert figures is not None, "a round has a clip"
        return Round(
            case=case,
            number=number,
            trace=trace,
            figures=figures,
            sha256=[(clip["latents_sha256"], clip["frames_sha256"]) for clip in made],
        )


def cases_of(config: PipelineConfig) -> dict[str, PipelineConfig]:
    """The pipeline and its baselines; a pipeline that is data parallel itself has only one."""
    cases = {PIPELINE: config}
    if config.layout.replica_size > 1:
        cases[DATA_PARALLEL] = config.data_parallel()
    return {**cases, ONE_DEVICE: config.alone()}


def _requests(asked: BenchConfig, config: PipelineConfig) -> list[ClipRequest]:
    """All inputs with the first seed, then all with the second, and so on."""
    is_dummy = config.model.is_dummy
    inputs = [ClipInput()] if is_dummy else _inputs(asked.workload, config.sampling)
    return in_turn(inputs, asked.measure.seeds, asked.workload.clips)


def _inputs(workload: Workload, sampling: SamplingConfig) -> list[ClipInput]:
    """Each image with each prompt; an image is None if clips start from text."""
    images: Sequence[Photo | None] = [None]
    if not isinstance(sampling, PromptedSampling) or sampling.from_image:
        given = workload.images or [str(path) for path in example_photos()]
        images = check_inputs(given, sampling.video_frames)
    example = EXAMPLE_PROMPT if isinstance(sampling, PromptedSampling) else None
    prompts: Sequence[str | None] = workload.prompts or [example]
    still = check_inputs([str(example_photos()[0])])[0]
    videos = tuple((name, still) for name in sampling.videos)
    return [
        ClipInput(image, prompt, workload.negative_prompt, videos)
        for image in images
        for prompt in prompts
    ]


def differing(rounds: Sequence[Round]) -> list[str]:
    """The cases, rounds and clips whose bits differ from the others'; empty if none do."""
    first = next((done for done in rounds if done.case == ONE_DEVICE), rounds[0])
    return [
        f"{done.case}, round {done.number + 1}, clip {clip}"
        for done in rounds
        for clip, hashes in enumerate(done.sha256)
        if hashes != first.sha256[clip]
    ]
