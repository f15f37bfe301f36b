"""The figures of a run, from its trace: for its manifest, the rounds of a bench, and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, get_args

from pydantic import Field, TypeAdapter, ValidationError

from svdpp.errors import InputError, RequestError, describe_fault
from svdpp.plan.actions import Kind
from svdpp.plan.costs import Costs, PerRank, step_from_pair
from svdpp.plan.forecast import replay, summarise
from svdpp.worker.messages import WaitCause

if TYPE_CHECKING:
    from svdpp.config import ClipRequest, PipelineConfig
    from svdpp.driver.pipeline import Pipeline
    from svdpp.driver.trace import Trace
    from svdpp.plan.schedule import Schedule

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
    image_wait: Amount = 0.0
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
    def costs(self) -> Costs | None:
        """The measured costs, for each rank where their speeds differ; None if no rank stepped."""
        steps = [self._on_one_rank(rank.step) for rank in self.ranks]
        stepped = [step.mean_seconds for step in steps if step.count]
        if not stepped:
            return None
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
        costs = self.costs and self.costs.to_json()
        return {**rounded(asdict(self)), "costs": rounded(costs)}


def measured_figures(
    trace: Trace,
    config: PipelineConfig,
    schedule: Callable[[int], Schedule | None] = lambda _: None,
) -> RunFigures | None:
    """The figures of the clips in `trace`; None if no rank has done an action.

    `schedule` says what the ranks do to make so many clips, for a forecast; None if it is unknown.
    """
    if not trace.spans:
        return None
    measured, end = trace.summary(), max(span.end for span in trace.spans)
    transfers = [packet.end - packet.start for packet in trace.received]
    figures = RunFigures(
        ranks=tuple(_of_rank(trace, config, rank) for rank in range(trace.world_size)),
        clips=measured.clips,
        num_steps=config.sampling.num_inference_steps,
        cfg_parallel=config.cfg_parallel,
        decodes=config.decodes,
        start_seconds=trace.ready - trace.begun,
        makespan=measured.makespan,
        first_clip=measured.first_clip,
        seconds_per_clip=measured.seconds_per_clip,
        bubble=measured.bubble,
        write_tail=max(0.0, (trace.last_written or end) - end),
        transfer_seconds=_work(transfers).mean_seconds,
    )
    return replace(figures, forecast_seconds=_forecast(figures, schedule(figures.clips)))


def figures_of_run(pipeline: Pipeline, requests: Sequence[ClipRequest]) -> RunFigures | None:
    """The figures of `requests` in a pipeline; without a forecast if some clips are lost."""
    kept = requests[-(pipeline.trace.last_clips or 0) :]

    def schedule(clips: int) -> Schedule | None:
        is_whole = clips == len(kept) and not pipeline.failures
        return pipeline.schedule(kept) if is_whole else None

    return measured_figures(pipeline.trace, pipeline.config, schedule)


def _of_rank(trace: Trace, config: PipelineConfig, rank: int) -> RankFigures:
    share, reported = config.layout.all_shares[rank], trace.reported[rank]
    spans = [span for span in trace.spans if span.rank == rank]
    compute = sum(span.end - span.start for span in spans)
    # The part of the run that the trace still has.
    kept = compute / reported.compute_seconds if reported.compute_seconds else 1.0

    def work(kind: Kind) -> WorkFigures:
        own = [span for span in spans if span.action.kind is kind]
        return _work([(span.end - span.start) / span.action.fraction for span in own])

    return RankFigures(
        rank=rank,
        device=reported.device,
        start=share.start,
        end=share.end,
        compute=compute,
        **_parts_of_time(trace, rank),
        **{f"{cause}_wait": kept * reported.waits.get(cause, 0.0) for cause in get_args(WaitCause)},
        step=_work([step.end - step.start for step in trace.steps if step.rank == rank]),
        encode=work(Kind.ENCODE),
        decode=work(Kind.DECODE),
        write=WorkFigures(
            count=reported.num_written,
            mean_seconds=reported.write_seconds / max(1, reported.num_written),
        ),
        load_seconds=reported.load_seconds,
        allocated_bytes=reported.allocated_bytes,
        peak_bytes=reported.reserved_bytes,
    )


def _parts_of_time(trace: Trace, rank: int) -> dict[str, float]:
    """Seconds of a rank, each measured on its own, from the first start to the last end of any."""
    begin = min([span.start for span in trace.spans] + [wait.start for wait in trace.waits])
    end = max(span.end for span in trace.spans)
    waits = [(wait.start, wait.end) for wait in trace.waits if wait.rank == rank]
    busy = [*waits, *((span.start, span.end) for span in trace.spans if span.rank == rank)]
    head = min((start for start, _ in busy), default=end) - begin
    tail = end - max((last for _, last in busy), default=end)
    arriving = [(packet.start, packet.end) for packet in trace.received if packet.rank == rank]
    transfer = _overlap(waits, arriving)
    waited = sum(last - start for start, last in waits)
    return {
        "wall": end - begin,
        "wait": max(0.0, waited - transfer),
        "transfer": transfer,
        "idle": head + tail,
    }


def _overlap(
    waits: Iterable[tuple[float, float]], transfers: Iterable[tuple[float, float]]
) -> float:
    """Seconds of `waits` that overlap with any of `transfers`; two at once count once."""
    reached, joined = float("-inf"), []
    for start, end in sorted(transfers):
        joined.append((max(start, reached), end))
        reached = max(reached, end)
    return sum(
        max(0.0, min(end, last) - max(start, first))
        for start, end in waits
        for first, last in joined
    )


def _work(seconds: Sequence[float]) -> WorkFigures:
    return WorkFigures(count=len(seconds), mean_seconds=sum(seconds) / max(1, len(seconds)))


def _forecast(figures: RunFigures, schedule: Schedule | None) -> float | None:
    if schedule is None or figures.costs is None:
        return None
    try:
        return summarise(replay(schedule, figures.costs), figures.world_size).makespan
    except (RequestError, ValueError):  # the costs of transfers between hosts are unknown
        return None


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
