"""The figures that a run leaves in its manifest, and a bench in its rounds, for `svdpp report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from svdpp.errors import InputError, RequestError, describe_fault
from svdpp.plan.costs import Costs, PerRank, step_from_pair

#: Checked when they are read back, because a manifest is untrusted input.
Amount = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=10**15)]
AtLeastOne = Annotated[int, Field(ge=1, le=10**6)]

# Ranks whose times of one step differ by less than this ratio count as equally fast.
_SAME_SPEED = 1.1


@dataclass(frozen=True, kw_only=True)
class WorkFigures:
    """How often a rank did one kind of work, and the mean seconds of it."""

    count: Count = 0
    mean_seconds: Amount = 0.0

    @property
    def seconds(self) -> float:
        """All of them together."""
        return self.count * self.mean_seconds


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """One rank's part of a run, in seconds and bytes; None where it is not known."""

    rank: Count
    device: str = ""
    start: Count = 0
    end: Count = 0
    """The steps that it does of a clip: the earliest, and the latest (exclusive)."""
    wall: Amount
    """From the first start to the last end of any rank's work."""
    compute: Amount
    wait: Amount = 0.0
    """Blocked without a transfer: by a neighbour, or by an image or file that is not ready."""
    transfer: Amount = 0.0
    """Blocked while a packet was arriving; transfers during the denoising do not count."""
    idle: Amount = 0.0
    """Before its first wait or work, and after its last."""
    photograph_wait: Amount = 0.0
    packet_wait: Amount = 0.0
    send_wait: Amount = 0.0
    writer_wait: Amount = 0.0
    """All waits by their causes; `packet_wait` includes `transfer`."""
    step: WorkFigures = WorkFigures()
    encode: WorkFigures = WorkFigures()
    decode: WorkFigures = WorkFigures()
    write: WorkFigures = WorkFigures()
    """Writing clips, in a thread beside the other work."""
    load_seconds: Amount = 0.0
    allocated_bytes: Count | None = None
    """Peak of tensors; None on the CPU."""
    peak_bytes: Count | None = None
    """Peak memory on its device; for a CPU rank, of the process."""

    @property
    def unaccounted(self) -> float:
        """What is in none of the four parts of `wall`, each of which is measured on its own."""
        return self.wall - self.compute - self.wait - self.transfer - self.idle


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What a run measured."""

    schema_version: int = 1
    ranks: Annotated[tuple[RankFigures, ...], Field(min_length=1)]
    clips: AtLeastOne
    """Clips that the ranks worked on in this run."""
    num_steps: AtLeastOne
    cfg_parallel: AtLeastOne = 1
    decodes: bool = True
    start_seconds: Amount = 0.0
    """From the start of the ranks until the last of them was ready."""
    makespan: Annotated[Amount, Field(gt=0)]
    first_clip: Amount
    seconds_per_clip: Amount
    bubble: Amount
    write_tail: Amount = 0.0
    """Between the last action of a rank and the last written clip."""
    transfer_seconds: Amount = 0.0
    """Mean of one transfer, at its receiver."""
    forecast_seconds: Amount | None = None
    """What the same actions take at each rank's own mean costs; None if that is unknown."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def costs(self) -> Costs:
        """The measured costs, for each rank where their speeds differ."""
        steps = [self._on_one_rank(rank.step) for rank in self.ranks]
        stepped = [step.mean_seconds for step in steps if step.count]
        if not stepped:
            raise RequestError("no step was measured")
        slowness = [1.0] * self.world_size
        if max(stepped) > _SAME_SPEED * min(stepped):
            slowness = [(step.mean_seconds or _mean(steps)) / _mean(steps) for step in steps]
        return Costs(
            step_seconds=_by_rank(steps, slowness),
            encode_seconds=_by_rank([rank.encode for rank in self.ranks], slowness),
            decode_seconds=_by_rank([rank.decode for rank in self.ranks], slowness),
            transfer_seconds=self.transfer_seconds,
            source="measured by svdpp run",
            device=self.ranks[0].device,
        )

    def _on_one_rank(self, step: WorkFigures) -> WorkFigures:
        if self.cfg_parallel == 1:
            return step
        return replace(step, mean_seconds=step_from_pair(step.mean_seconds, self.transfer_seconds))

    def to_json(self) -> dict[str, Any]:
        """The figures as plain values, with the costs as in a costs file."""
        has_stepped = any(rank.step.count for rank in self.ranks)
        costs = self.costs.to_json() if has_stepped else None
        return {**rounded(asdict(self)), "costs": rounded(costs)}


_FIGURES = TypeAdapter(RunFigures)


def figures_of(manifest: Mapping[str, Any], where: str) -> RunFigures | None:
    """The figures in a run's manifest; None if the run has left none."""
    values = manifest.get("measured")
    if values is None:
        return None
    if isinstance(values, dict) and values.get("schema_version", 1) != 1:
        raise InputError(f"{where}: the run's figures are of another version of svdpp")
    try:
        return _FIGURES.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "it"
        what = f"{place} {describe_fault(first)}"
        raise InputError(f"{where}: the run's figures are damaged: {what}") from error


def _by_rank(works: Sequence[WorkFigures], slowness: Sequence[float]) -> PerRank:
    """Mean seconds of one kind of work on each rank; a single number for ranks of equal speed.

    A rank without such work would take as long as the others, times its own slowness.
    """
    if len(set(slowness)) == 1:
        return _mean(works)
    pairs = list(zip(works, slowness, strict=True))
    at_mean_speed = [work.mean_seconds / slow for work, slow in pairs if work.count]
    usual = sum(at_mean_speed) / max(1, len(at_mean_speed))
    return tuple(work.mean_seconds if work.count else usual * slow for work, slow in pairs)


def _mean(works: Sequence[WorkFigures]) -> float:
    return sum(work.seconds for work in works) / max(1, sum(work.count for work in works))


def rounded(value: Any) -> Any:
    """`value` with numbers of six significant digits, which keeps the file small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value
