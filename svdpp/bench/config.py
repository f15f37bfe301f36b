"""Configuration of a benchmark: YAML and overrides, checked before anything runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from svdpp.bench.targets import Bound, check_name
from svdpp.config import (
    DEFAULT_MODEL,
    SAMPLING_CLASSES,
    Dtype,
    Fit,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
    is_built_in,
    params_of,
    sampling_of_model,
)
from svdpp.config.cost_files import find_costs
from svdpp.config.limits import MAX_CLIPS, MAX_SEED, read_small_file
from svdpp.config.pipeline import amp_error
from svdpp.driver.request import PipelineRequest, default_dtype, find_device, with_hosts_of
from svdpp.errors import (
    InputError,
    RequestError,
    describe_fault,
    fault_details,
    nearest,
    recorded_name,
    redact_all,
)
from svdpp.launch.world import World
from svdpp.models.checkpoint import find_checkpoint
from svdpp.plan.parallel import Split, canonical_split, layout_fields, layout_options

_MAX_ROUNDS = 1000
_SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "bench"

#: Type of a float that also accepts text, because YAML 1.1 parses 1e3 as text.
Number = Annotated[float, Field(strict=False)]
Positive = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Base class of the sections of a benchmark's configuration.

    Unknown fields are rejected, and types are strict: `true` is not 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class Model(Section):
    """Section `model` of a benchmark's configuration; its fields are options of `svdpp run`."""

    name: str = DEFAULT_MODEL
    family: str | None = None
    revision: str | None = None
    variant: str | None = None
    local_files_only: bool = False
    memory_opt: bool = False
    channels_last: bool = False
    vae_tiling: bool = False
    attention_backend: str | None = None
    latent_shape: list[Positive] = Field(default=[1, 4, 14, 64, 64], min_length=5, max_length=5)
    """Shape of the dummy model's latents: (B, C, F, H, W)."""


def _layout_fields() -> dict[str, Any]:
    """Return the type and default of each layout option, for a benchmark's configuration."""
    types = get_type_hints(ParallelConfig)
    for name, annotation in types.items():
        if annotation is int:
            types[name] = Positive
    types["split"] = Annotated[Split, BeforeValidator(canonical_split)]
    defaults = ParallelConfig()
    return {
        option.name: (types[name], getattr(defaults, name))
        for name, option in layout_options().items()
    }


_Layout: Any = create_model("_Layout", __base__=Section, **_layout_fields())


class Ranks(_Layout):  # type: ignore[misc]
    """Section `pipeline` of a benchmark's configuration; its fields are options of `svdpp run`.

    The default split is `balanced` for a model with two experts.
    """

    world: Positive | None = None
    """Number of ranks W; None: one for each GPU, or 2 on the CPU."""
    device: str = "cuda"
    costs: str | None = None
    """Costs by which the split is chosen: a costs file or a preset. None: the preset svd-xt-a100
    for SVD models; for other models, a step costs 1 s, and other work nothing."""
    threads: Positive | None = None
    """CPU threads of each rank, in the pipeline and the baselines; None: 1 on CUDA, else cores //
    ranks."""
    deterministic: bool = False
    """Whether torch uses only deterministic kernels, in the pipeline and the baselines."""
    allow_mixed_devices: bool = False
    checksum: bool = False
    timeout: Number = 600.0
    """Seconds without progress after which a rank counts as stalled."""
    start_timeout: Number = 600.0
    """Seconds within which the ranks must be ready."""


#: Sampling parameters that have a shorter name in the section `workload`.
_SHORT_NAMES = {"num_inference_steps": "steps", "num_frames": "frames"}


def _parameters() -> dict[str, Any]:
    """Return the type and default of each sampling parameter, for a benchmark's configuration.

    Each default is None, which means the model's default.
    """
    kinds: dict[type, Any] = {int: Annotated[int, Field(ge=0)], float: Number}
    return {
        _SHORT_NAMES.get(name, name): (kinds[param.kind] | None, None)
        for family in SAMPLING_CLASSES
        for name, param in params_of(cast("Any", SAMPLING_CLASSES[family])).items()
    }


_Sampled: Any = create_model("_Sampled", __base__=Section, **_parameters())


class Workload(_Sampled):  # type: ignore[misc]
    """Section `workload` of a benchmark's configuration: clips and their sampling parameters."""

    clips: Annotated[int, Field(ge=1, le=MAX_CLIPS)] = 8
    """Number of measured clips in each round, without warm-up clips."""
    images: list[str] = Field(default=[])
    """Paths of images; the clips cycle through them. Empty: svdpp's four example images, or no
    image for a model that also makes clips from text."""
    prompts: list[str] | None = Field(default=None, min_length=1)
    """Prompts, each combined with each image. None: an example prompt, if the model takes
    prompts."""
    negative_prompt: str | None = None
    decode_chunk_size: Positive | None = None
    fit: Fit = "stretch"

    def sampling_values(self) -> dict[str, Any]:
        """Return the sampling parameters of a benchmark's clips by the names of their fields.

        None means the model's default.
        """
        field_of = {short: name for name, short in _SHORT_NAMES.items()}
        values = self.model_dump(exclude={"clips", "images", "prompts", "negative_prompt"})
        return {field_of.get(name, name): value for name, value in values.items()}


class Measure(Section):
    """Section `measure` of a benchmark's configuration: rounds, warm-up clips and seeds."""

    warmups: Annotated[int, Field(ge=0, le=_MAX_ROUNDS)] = 1
    """Number of warm-up clips in each round, before the measured clips. With several replicas or
    decoders, each decoder gets this many."""
    repeats: Annotated[int, Field(ge=1, le=_MAX_ROUNDS)] = 3
    """Number of rounds. A round measures the pipeline and each baseline once. Each measurement
    starts new processes; only ranks that a launcher (torchrun or Slurm) started are reused."""
    seeds: list[Annotated[int, Field(ge=0, le=MAX_SEED)]] = Field(default=[0], min_length=1)
    """Seeds of the clips: the first seed with every input, then the second seed with every input,
    and so on. After the last seed, the first one follows again."""
    peak_tflops: Annotated[float, Field(strict=False, gt=0, allow_inf_nan=False)] | None = None
    """Peak of each device in the model's dtype, in TFLOP/s. None: the GPU's published peak
    (docs/benchmarks.md); if there is none, utilisation is not measured."""


def _no_amp(precision: object) -> object:
    if precision == "amp":
        raise amp_error()
    return precision


class BenchConfig(Section):
    """Configuration of a benchmark: model, ranks, clips, measurement and targets."""

    experiment: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
    """Name of the folder for the results."""
    model: Model = Model()
    pipeline: Ranks = Ranks()
    workload: Workload = Workload()
    precision: Annotated[Dtype | None, BeforeValidator(_no_amp)] = None
    """Dtype of the pipeline and the baselines. None: the default of `svdpp run --dtype`."""
    measure: Measure = Measure()
    profile: bool = False
    """Whether torch.profiler profiles one clip on rank 0, in an extra run after all rounds."""
    targets: dict[str, Bound] = Field(default={})
    """Bounds by the name of a metric, such as `tflops: {min: 100}`."""

    def with_defaults_from(self, config: PipelineConfig) -> BenchConfig:
        """Return a benchmark's configuration with defaults of the machine and model filled in.

        Args:
            config: Resolved configuration of the pipeline.
        """
        sampling, model = config.sampling, config.model
        names = set(Workload.model_fields) & {each.name for each in fields(sampling)}
        chosen = {name: getattr(sampling, name) for name in names}
        chosen |= {"frames": sampling.num_frames, "steps": sampling.num_inference_steps}
        ranks = {
            "world": config.world_size,
            "threads": config.num_threads,
            "split": config.parallel.split,
        }
        return self.model_copy(
            update={
                "pipeline": self.pipeline.model_copy(update=ranks),
                "workload": self.workload.model_copy(update=chosen),
                "precision": model.dtype,
            }
        )

    @property
    def sha256(self) -> str:
        """SHA-256 of a benchmark's configuration, without the experiment's name and the targets."""
        values = self.model_dump(mode="json", exclude={"experiment", "targets"})
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def to_yaml(self) -> str:
        """Return all fields of a benchmark's configuration as YAML that `read_config` can read."""
        values = self.model_dump()
        values["model"]["name"] = recorded_name(self.model.name)
        return str(yaml.safe_dump(redact_all(values), sort_keys=False))


def shipped() -> list[str]:
    """Return the names of the benchmark configurations that come with svdpp."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def read_config(name: str, overrides: Sequence[str]) -> BenchConfig:
    """Read a benchmark's configuration, and apply the overrides of the command line.

    Args:
        name: Path of a YAML file, or the name of a configuration that comes with svdpp.
        overrides: Assignments `section.field=value` with the value in YAML. Of several assignments
            to a field, the last one applies.

    Raises:
        InputError: The file cannot be read, or is not YAML.
        RequestError: A field or target is unknown, or a value has a wrong type or range.
    """
    path = _find(name)
    content = _read(path)
    for override in overrides:
        _override(content, override)
    content.setdefault("experiment", path.stem)
    try:
        config = BenchConfig.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise RequestError(
                f"{name}: no field {where!r}", _known(where), details={"field": where}
            ) from error
        raise RequestError(
            f"{name}: {where} {describe_fault(first)}", details=fault_details(first)
        ) from error
    for target in config.targets:
        check_name(target)
    return config


def pipeline_config(bench_config: BenchConfig, launched: World | None = None) -> PipelineConfig:
    """Return a benchmark's `PipelineConfig`, equal to that of `svdpp run` with the same options.

    Args:
        bench_config: Configuration of the benchmark.
        launched: Rank and world size that a launcher (torchrun or Slurm) gave to this process;
            None: no launcher started the process.

    Raises:
        RequestError: The fields contradict each other, or do not suit the model or the machine.
    """
    ranks, workload = bench_config.pipeline, bench_config.workload
    shape = tuple(bench_config.model.latent_shape)
    model = ModelConfig(
        dummy_latent_shape=shape, **bench_config.model.model_dump(exclude={"latent_shape"})
    )
    checkpoint = None if is_built_in(model) else find_checkpoint(model, weights=False)
    family = "svd" if checkpoint is None else checkpoint.family
    needs_image = checkpoint is None or checkpoint.image_use == "needed"
    sampling = sampling_of_model(
        model.name,
        family,
        workload.sampling_values(),
        from_image=bool(workload.images) or needs_image,
        has_last_image=checkpoint is not None and checkpoint.last_image_use == "needed",
        memory_opt=model.memory_opt,
    )
    device = find_device(ranks.device, model.name)
    given = ranks.model_dump(exclude_defaults=True, include=set(_Layout.model_fields))
    costs = None if ranks.costs is None else with_hosts_of(find_costs(ranks.costs), launched)
    request = PipelineRequest(
        model=replace(model, dtype=bench_config.precision or default_dtype(device, family)),
        sampling=sampling,
        device=device,
        parallel=layout_fields(given),
        num_ranks=ranks.world,
        num_threads=ranks.threads,
        settings={
            "timeout_seconds": ranks.timeout,
            "start_timeout_seconds": ranks.start_timeout,
            "checksum": ranks.checksum,
            "deterministic": ranks.deterministic,
            "allow_mixed_devices": ranks.allow_mixed_devices,
        },
        num_clips=workload.clips,
        launched=launched,
        costs=costs,
        checkpoint=checkpoint,
    )
    return request.resolve()[0]


def _find(name: str) -> Path:
    if Path(name).suffix in (".yaml", ".yml") or Path(name).exists():
        return Path(name)
    if name in shipped():
        return _SHIPPED / f"{name}.yaml"
    raise RequestError(
        f"{name!r} is neither a file nor a configuration that comes with svdpp",
        nearest(name, shipped(), f"use one of {', '.join(shipped())}"),
    )


def _parse_yaml(text: str | bytes) -> Any:
    """Parse a YAML value; reject aliases, because a few nested ones could exhaust the memory."""
    if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
        raise yaml.YAMLError("YAML aliases are not accepted: write the value out")
    return yaml.safe_load(text)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = _parse_yaml(read_small_file(path, "configuration"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        words = " ".join(str(error).split())
        raise InputError(
            f"{str(path)!r} is not YAML: {words}", details={"path": str(path), "problem": words}
        ) from error
    if content is not None and not isinstance(content, dict):
        raise InputError(
            f"{str(path)!r} holds no sections, such as 'workload:'", details={"path": str(path)}
        )
    # A section whose lines are all commented out is read as None; its defaults apply.
    return {key: value for key, value in (content or {}).items() if value is not None}


def _override(content: dict[str, Any], text: str) -> None:
    dotted, equals, value = text.partition("=")
    if not equals or not dotted:
        raise RequestError(f"an override is section.field=value, got {text!r}")
    *sections, key = dotted.split(".")
    # the name of a target may contain a dot, as in `diffusers.step_p50_seconds`
    if sections[:1] == ["targets"] and len(sections) > 1:
        sections = ["targets", ".".join(sections[1:])]
    values = content
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise RequestError(f"{text!r}: {section!r} is not a section")
    try:
        values[key] = _parse_yaml(value)
    except yaml.YAMLError as error:
        raise RequestError(f"{text!r}: the value is not YAML") from error


def _known(where: str) -> str:
    """Return a hint for an unknown field of a benchmark's configuration: a similar known name."""
    names, last = list(BenchConfig.model_fields), where.rpartition(".")[2]
    for section, about in BenchConfig.model_fields.items():
        names += [f"{section}.{name}" for name in getattr(about.annotation, "model_fields", ())]
    same = (name for name in names if name.rpartition(".")[2] == last)
    return nearest(
        next(same, where), names, f"the fields are {', '.join(BenchConfig.model_fields)}"
    )
