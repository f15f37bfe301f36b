"""The figures that a run leaves in its manifest for `svdpp report`, and its head-room."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from svdpp.errors import InputError, RequestError, describe_fault
from svdpp.plan.costs import Costs, PerRank
from svdpp.plan.layout import Layout, Split

#: Checked when they are read back, because a manifest is untrusted input.
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Amount = Seconds
Count = Annotated[int, Field(ge=0, le=10**15)]
AtLeastOne = Annotated[int, Field(ge=1, le=10**6)]

# Ranks whose times of one step differ by less than this ratio count as equally fast.
_SAME_SPEED = 1.1


class _Checked:
    __pydantic_config__ = ConfigDict(allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class WorkFigures(_Checked):
    """How often a rank did one kind of work, and the mean seconds of it."""

    count: Count = 0
    mean_seconds: Seconds = 0.0

    @property
    def seconds(self) -> float:
        """All of them together."""
        return self.count * self.mean_seconds


@dataclass(frozen=True, kw_only=True)
class GpuFigures(_Checked):
    """What NVML said of a rank's GPU, once a second from its start to its end; None: nothing.

    Clocks are those of samples in which the GPU had work: an idle GPU lowers its clock.
    """

    samples: Count
    mean_utilisation: Amount | None = None
    peak_utilisation: Amount | None = None
    """Part of the time in which a kernel ran, 0 to 1."""
    peak_memory_bytes: Count | None = None
    mean_watts: Amount | None = None
    peak_watts: Amount | None = None
    peak_celsius: Amount | None = None
    mean_sm_mhz: Amount | None = None
    peak_sm_mhz: Amount | None = None
    joules: Amount | None = None
    """Energy of the whole GPU, whatever else ran on it."""
    throttled: Mapping[str, Amount] = field(default_factory=dict)
    """For each reason, the part of the samples in which it lowered the clock."""

    def __str__(self) -> str:
        mean = f"{self.mean_utilisation:.0%}" if self.mean_utilisation is not None else "?"
        peak = f"{self.peak_utilisation:.0%}" if self.peak_utilisation is not None else "?"
        known = [
            f"load {mean} (at most {peak})",
            *_known(self.mean_watts, "{:.0f} W"),
            *_known(self.peak_celsius, "at most {:.0f} C"),
            *_known(self.mean_sm_mhz, "{:.0f} MHz"),
        ]
        return ", ".join(known)


@dataclass(frozen=True, kw_only=True)
class RankFigures(_Checked):
    """One rank's part of a run, in seconds and bytes; None where it is not known."""

    rank: Count
    device: str = ""
    device_name: str = ""
    """Of the product; empty on the CPU."""
    start: Count = 0
    end: Count = 0
    """The steps that it does of a clip: the earliest, and the latest (exclusive)."""
    wall: Seconds
    compute: Seconds
    wait: Seconds = 0.0
    transfer: Seconds = 0.0
    idle: Seconds = 0.0
    """The parts of `wall`, as in `TimeBreakdown`."""
    photograph_wait: Seconds = 0.0
    packet_wait: Seconds = 0.0
    send_wait: Seconds = 0.0
    writer_wait: Seconds = 0.0
    """All waits by their causes; `packet_wait` includes `transfer`."""
    step: WorkFigures = field(default_factory=WorkFigures)
    encode: WorkFigures = field(default_factory=WorkFigures)
    decode: WorkFigures = field(default_factory=WorkFigures)
    write: WorkFigures = field(default_factory=WorkFigures)
    """Writing clips, in a thread beside the other work."""
    p95_step_seconds: Seconds = 0.0
    load_seconds: Seconds = 0.0
    cpu_seconds: Seconds | None = None
    """Of the process while it computed, all threads together."""
    peak_bytes: Count | None = None
    """Peak memory on its device; for a CPU rank, of the process."""
    device_bytes: Count | None = None
    """Memory of its device; for a CPU rank, of the host."""
    memory_id: str = ""
    """Ranks with the same one share `device_bytes`."""
    gpu: GpuFigures | None = None


@dataclass(frozen=True, kw_only=True)
class ForecastFigures(_Checked):
    """What the run was expected to take, in seconds from the first action; None if unknown."""

    before: Seconds | None = None
    """By the costs that the run assumed at its start."""
    after_first_clip: Seconds | None = None
    """By the costs measured until the first clip was done."""
    afterwards: Seconds | None = None
    """By each rank's own mean costs of the whole run."""


@dataclass(frozen=True, kw_only=True)
class RunFigures(_Checked):
    """What a run measured."""

    schema_version: int = 1
    ranks: tuple[RankFigures, ...]
    clips: AtLeastOne
    """Clips that the ranks worked on in this run."""
    num_steps: AtLeastOne
    split: Split = "uniform"
    replicas: AtLeastOne = 1
    decoders: AtLeastOne = 1
    decodes: bool = True
    device: str = "cpu"
    num_threads: AtLeastOne = 1
    usable_cores: AtLeastOne = 1
    num_devices: Count = 0
    """GPUs that the run could use; 0 without."""
    frames: Count = 0
    decode_chunk_size: Count = 0
    start_seconds: Seconds = 0.0
    """From the start of the ranks until the last of them was ready."""
    makespan: Annotated[float, Field(gt=0, le=1e9)]
    first_clip: Seconds
    seconds_per_clip: Seconds
    bubble: Seconds
    write_tail: Seconds = 0.0
    """Between the last action of a rank and the last written clip."""
    transfer_seconds: Seconds = 0.0
    """Mean of one transfer, at its receiver."""
    forecast: ForecastFigures = field(default_factory=ForecastFigures)
    model: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `ModelConfig` and `SamplingConfig`, to count FLOPs."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def joules_per_clip(self) -> float | None:
        """Energy of all GPUs for each clip; None if that of one is not known."""
        by_gpu = {rank.memory_id: rank.gpu.joules if rank.gpu else None for rank in self.ranks}
        known = [joules for joules in by_gpu.values() if joules is not None]
        return sum(known) / self.clips if len(known) == len(by_gpu) else None

    @property
    def costs(self) -> Costs:
        """The measured costs, for each rank where their speeds differ."""
        stepped = [each.step.mean_seconds for each in self.ranks if each.step.count]
        if not stepped:
            raise RequestError("no step was measured")
        mean = _mean_of([each.step for each in self.ranks])
        if max(stepped) <= _SAME_SPEED * min(stepped):
            slowness = [1.0] * self.world_size
        else:
            slowness = [(each.step.mean_seconds or mean) / mean for each in self.ranks]
        return Costs(
            step_seconds=_by_rank([each.step for each in self.ranks], slowness),
            encode_seconds=_by_rank([each.encode for each in self.ranks], slowness),
            decode_seconds=_by_rank([each.decode for each in self.ranks], slowness),
            transfer_seconds=self.transfer_seconds,
            source="measured by svdpp run",
            device=self.ranks[0].device,
        )

    @property
    def layout(self) -> Layout:
        """How the ranks shared the work, at the measured costs."""
        return Layout(
            num_steps=self.num_steps,
            world_size=self.world_size,
            split=self.split,
            replicas=self.replicas,
            decoders=self.decoders,
            costs=self.costs,
            decodes=self.decodes,
        )

    def to_json(self) -> dict[str, Any]:
        """The figures as plain values, with the costs as in a costs file."""
        values = _rounded(asdict(self))
        try:
            return {**values, "costs": _rounded(self.costs.to_json())}
        except RequestError:
            return {**values, "costs": None}


_FIGURES = TypeAdapter(RunFigures)


def figures_of(manifest: Mapping[str, Any], where: str) -> RunFigures | None:
    """The figures in a run's manifest; None if the run has left none."""
    values = manifest.get("measured")
    if values is None:
        return None
    try:
        figures = _FIGURES.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        what = f"{place} {describe_fault(first)}"
        raise InputError(f"{where}: the run's figures are damaged: {what}") from error
    if figures.schema_version != 1 or not figures.ranks:
        raise InputError(f"{where}: the run's figures are of another version of svdpp")
    return figures


def _known(value: float | None, pattern: str) -> list[str]:
    return [] if value is None else [pattern.format(value)]


def _by_rank(works: list[WorkFigures], slowness: list[float]) -> PerRank:
    """Mean seconds of one kind of work on each rank; a single number for ranks of equal speed.

    A rank without such work would take as long as the others, times its own slowness.
    """
    if len(set(slowness)) == 1:
        return _mean_of(works)
    done = [(work, slow) for work, slow in zip(works, slowness, strict=True) if work.count]
    at_mean_speed = [work.mean_seconds / slow for work, slow in done]
    usual = sum(at_mean_speed) / len(at_mean_speed) if done else 0.0
    return tuple(
        work.mean_seconds if work.count else usual * slow
        for work, slow in zip(works, slowness, strict=True)
    )


def _mean_of(works: list[WorkFigures]) -> float:
    count = sum(work.count for work in works)
    return sum(work.seconds for work in works) / count if count else 0.0


def _rounded(value: Any) -> Any:
    """`value` with numbers of six significant digits, which keeps the file small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return value


@dataclass(frozen=True, kw_only=True)
class HeadRoom:
    """Peak memory of the ranks that share one memory, and its size, in bytes."""

    ranks: tuple[int, ...]
    peak_bytes: int
    total_bytes: int

    @property
    def free_share(self) -> float:
        """The part of the memory that was never used."""
        return 1 - self.peak_bytes / self.total_bytes


def head_rooms(figures: RunFigures) -> list[HeadRoom]:
    """The head-room of each memory whose size and users' peaks are known."""
    sharing: dict[str, list[RankFigures]] = defaultdict(list)
    for rank in figures.ranks:
        sharing[rank.memory_id or f"rank {rank.rank}"].append(rank)
    return [
        HeadRoom(
            ranks=tuple(rank.rank for rank in ranks),
            peak_bytes=sum(rank.peak_bytes or 0 for rank in ranks),
            total_bytes=ranks[0].device_bytes,
        )
        for ranks in sharing.values()
        if ranks[0].device_bytes and all(rank.peak_bytes for rank in ranks)
    ]
