"""Metrics of a run, computed from its trace, for manifests, benchmarks and reports."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from svdpp.errors import InputError, RequestError, describe_fault, fault_details
from svdpp.plan.actions import Kind
from svdpp.plan.costs import CostModel, PerRank, step_from_pair
from svdpp.plan.forecast import Span, simulate_schedule, summarise

if TYPE_CHECKING:
    from svdpp.config import ClipRequest, PipelineConfig
    from svdpp.driver.pipeline import Pipeline
    from svdpp.driver.trace import RankMetrics, Trace
    from svdpp.plan.actions import Schedule

# Maximum ratio between the step times of two ranks that count as equally fast.
_SAME_SPEED = 1.1

# Fields of a model on which its FLOPs depend.
_MODEL_FIELDS = ("name", "family", "revision", "variant", "dtype", "dummy_latent_shape")

#: Types of numbers with limits, because a manifest that is read is untrusted input.
Amount = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=10**15)]
PositiveCount = Annotated[int, Field(ge=1, le=10**6)]


@dataclass(frozen=True, kw_only=True)
class WorkMetrics:
    """Measurements of one kind of work on a rank: how often it was done, and its mean seconds."""

    count: Count = 0
    mean_seconds: Amount = 0.0

    @property
    def seconds(self) -> float:
        """Total seconds of this kind of work on the rank."""
        return self.count * self.mean_seconds


@dataclass(frozen=True, kw_only=True)
class RankRunMetrics:
    """Metrics of one rank in a run: seconds and bytes; None where a value is unknown."""

    rank: Count
    device: str = ""
    device_name: str = ""
    """Name of the GPU, such as "NVIDIA H200"; empty on the CPU."""
    start: Count = 0
    """Index of the first denoising step that the rank computes."""
    end: Count = 0
    """Index after the last denoising step that the rank computes."""
    wall: Amount
    """Seconds from the first start of an action or wait on any rank to the end of the last action
    on any rank; the same for all ranks."""
    compute: Amount
    """Seconds in which the rank computed."""
    wait: Amount = 0.0
    """Seconds in which the rank waited for another rank, an image or a file. The time in which an
    awaited packet arrives is not included: it is in `transfer`."""
    transfer: Amount = 0.0
    """Seconds in which the rank waited while a packet arrived. Transfers during compute do not
    count."""
    idle: Amount = 0.0
    """Seconds before the rank's first action or wait, and after its last action or wait."""
    image_wait: Amount = 0.0
    """Seconds in which the rank waited for images to be read."""
    packet_wait: Amount = 0.0
    """Seconds in which the rank waited for packets, including `transfer`."""
    writer_wait: Amount = 0.0
    """Seconds in which the rank waited for the thread that writes clips."""
    step: WorkMetrics = WorkMetrics()
    encode: WorkMetrics = WorkMetrics()
    decode: WorkMetrics = WorkMetrics()
    decode_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Mean fraction of a clip's frames that one DECODE action of the rank produces."""
    write: WorkMetrics = WorkMetrics()
    """Measurements of writing clips, which a thread does at the same time as the rank's other
    work."""
    load_seconds: Amount = 0.0
    allocated_bytes: Count | None = None
    """Peak bytes of tensors on the GPU; None on the CPU."""
    peak_bytes: Count | None = None
    """Peak bytes that torch reserved on the GPU; on the CPU, peak bytes of the rank's process."""
    sent_bytes: Count | None = None
    """Bytes of tensors sent to other ranks, from the rank's start to its last report of this count;
    a rank reports it once a second."""
    received_bytes: Count | None = None
    """Bytes of tensors received from other ranks, from the rank's start to its last report of this
    count; a rank reports it once a second."""
    resident_bytes: Count | None = None
    """Largest resident set of the process in bytes, sampled once a second."""
    gpu_load: Amount | None = None
    """Mean fraction of the time in which the GPU ran a kernel, by NVML; None on the CPU."""
    gpu_memory_bytes: Count | None = None
    """Peak bytes of GPU memory in use by all processes, by NVML; None on the CPU."""
    gpu_watts: Amount | None = None
    """Mean power of the GPU in watts, by NVML; None on the CPU."""

    @property
    def unaccounted(self) -> float:
        """Seconds of a rank's `wall` that are not in `compute`, `wait`, `transfer` or `idle`.

        The four parts are measured independently, so the value shows the error of measurement.
        """
        return self.wall - self.compute - self.wait - self.transfer - self.idle


@dataclass(frozen=True, kw_only=True)
class RunMetrics:
    """Metrics of a run as a whole, and of each of its ranks."""

    schema_version: Literal[1] = 1
    ranks: Annotated[tuple[RankRunMetrics, ...], Field(min_length=1)]
    clips: PositiveCount
    """Number of clips that the ranks worked on in this run."""
    num_steps: PositiveCount
    """Number of denoising steps of a clip."""
    cfg_parallel: PositiveCount = 1
    """Number of ranks that share the two guidance passes of a step: 2 in CFG pairs, else 1."""
    decodes: bool = True
    """Whether the clips were decoded."""
    start_seconds: Amount = 0.0
    """Seconds from the start of the ranks until the last of them was ready."""
    makespan: Annotated[Amount, Field(gt=0)]
    """Seconds from the start of the first action on any rank to the end of the last action."""
    first_clip: Amount
    """Seconds from the start of the first action on any rank until the first clip is finished."""
    seconds_per_clip: Amount
    """Seconds from one finished clip to the next, in steady state."""
    bubble: Amount
    """Fraction of the makespan in which a rank does not compute, as the mean of all ranks."""
    write_tail: Amount = 0.0
    """Seconds from the end of the ranks' last action until the last clip was written."""
    transfer_seconds: Amount = 0.0
    """Mean seconds of one transfer, measured at its receiver."""
    costs: CostModel | None = None
    """Measured costs, separate for each rank if the ranks' speeds differ; None if no step was
    measured."""
    forecast_seconds: Amount | None = None
    """Forecast of `makespan` for the same actions, from the measured costs; None if no forecast is
    possible."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model on which FLOPs depend; empty in manifests of earlier versions."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of the clips; empty in manifests of earlier versions."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""
        return len(self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Return the metrics of a run as plain values, with the costs as in a costs file."""
        return {**rounded(asdict(self)), "costs": rounded(self.costs and self.costs.to_json())}


def collect_run_metrics(
    trace: Trace, config: PipelineConfig, schedule: Schedule | None = None
) -> RunMetrics | None:
    """Return the metrics of a run, from the trace of its clips.

    Args:
        trace: Measurements of the run.
        config: Resolved configuration of the run.
        schedule: Actions of the ranks for these clips, for a forecast; None: no forecast.

    Returns:
        Metrics; None if no rank has done an action.
    """
    if not trace.spans:
        return None
    measured, end = trace.summary(), max(span.end for span in trace.spans)
    device, costs = trace.rank_metrics[0].device, None
    if trace.steps:
        costs = average_costs(config, [trace], source="measured by svdpp run", device=device)
    return RunMetrics(
        ranks=tuple(_rank_metrics(trace, config, rank) for rank in range(trace.world_size)),
        clips=measured.clips,
        num_steps=config.sampling.num_inference_steps,
        cfg_parallel=config.parallel.cfg_parallel_size,
        decodes=config.decodes,
        start_seconds=trace.ready - trace.begun,
        makespan=measured.makespan,
        first_clip=measured.first_clip,
        seconds_per_clip=measured.seconds_per_clip,
        bubble=measured.bubble,
        write_tail=max(0.0, (trace.last_written or end) - end),
        transfer_seconds=_work_metrics(
            packet.end - packet.start for packet in trace.received
        ).mean_seconds,
        costs=costs,
        forecast_seconds=_forecast(costs, schedule, trace.world_size),
        model={name: getattr(config.model, name) for name in _MODEL_FIELDS},
        sampling={**asdict(config.sampling), "family": config.sampling.family},
    )


def metrics_of_pipeline(pipeline: Pipeline, requests: Sequence[ClipRequest]) -> RunMetrics | None:
    """Return the metrics of the run of a pipeline that has ended.

    The metrics also contain the makespan that the forecast gives for this run, except if a clip has
    failed, because the forecast assumes that all clips are finished.

    Args:
        pipeline: Pipeline that has ended.
        requests: Requests of the pipeline's clips, in order. If the trace keeps only the
            last clips, only their requests are used.

    Returns:
        Metrics; None if no rank has done an action.
    """
    kept = requests[-(pipeline.trace.last_clips or 0) :]
    made = {span.clip for span in pipeline.trace.spans}
    is_whole = len(made) == len(kept) and not pipeline.failures
    schedule = pipeline.schedule(kept) if is_whole else None
    metrics = collect_run_metrics(pipeline.trace, pipeline.config, schedule)
    if metrics is not None and any(request.sampling is not None for request in requests):
        # FLOPs can be counted only if all clips have the same parameters.
        return replace(metrics, sampling={})
    return metrics


def _rank_metrics(trace: Trace, config: PipelineConfig, rank: int) -> RankRunMetrics:
    share, reported = config.layout.all_shares[rank], trace.rank_metrics[rank]
    spans = [span for span in trace.spans if span.rank == rank]
    compute = sum(span.end - span.start for span in spans)
    # The trace may keep only some clips. The waits, which the rank has counted for all clips, are
    # scaled by the fraction of the compute time that the trace has kept.
    kept = compute / reported.compute_seconds if reported.compute_seconds else 1.0

    fractions = [span.action.fraction for span in spans if span.action.kind is Kind.DECODE]

    def work(kind: Kind) -> WorkMetrics:
        return _work_metrics(
            _whole_clip_seconds(span) for span in spans if span.action.kind is kind
        )

    return RankRunMetrics(
        rank=rank,
        device=reported.device,
        device_name=reported.device_name,
        start=share.start,
        end=share.end,
        compute=compute,
        **{**_time_breakdown(trace, rank), **_stats_fields(reported)},
        image_wait=kept * reported.waits.get("image", 0.0),
        packet_wait=kept * reported.waits.get("packet", 0.0),
        writer_wait=kept * reported.waits.get("writer", 0.0),
        step=_work_metrics(step.end - step.start for step in trace.steps if step.rank == rank),
        encode=work(Kind.ENCODE),
        decode=work(Kind.DECODE),
        decode_fraction=statistics.fmean(fractions) if fractions else 1.0,
        write=WorkMetrics(
            count=reported.num_written,
            mean_seconds=reported.write_seconds / max(1, reported.num_written),
        ),
        load_seconds=reported.load_seconds,
        allocated_bytes=reported.allocated_bytes,
        peak_bytes=reported.reserved_bytes,
    )


def _stats_fields(reported: RankMetrics) -> dict[str, Any]:
    stats = reported.stats
    return {
        "sent_bytes": None if stats is None else stats.sent_bytes,
        "received_bytes": None if stats is None else stats.received_bytes,
        "resident_bytes": reported.peak_resident_bytes or None,
        "gpu_load": reported.gpu_load.value,
        "gpu_memory_bytes": reported.peak_gpu_memory_bytes,
        "gpu_watts": reported.gpu_watts.value,
    }


def _time_breakdown(trace: Trace, rank: int) -> dict[str, Any]:
    """Return the fields `wall`, `wait`, `transfer` and `idle` of a rank's metrics, in seconds."""
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
    """Return the seconds of `waits` during which at least one of `transfers` was in progress.

    Waits and transfers are tuples (start, end), in seconds.
    """
    reached, joined = float("-inf"), []
    for start, end in sorted(transfers):
        joined.append((max(start, reached), end))
        reached = max(reached, end)
    return sum(
        max(0.0, min(end, last) - max(start, first))
        for start, end in waits
        for first, last in joined
    )


def _work_metrics(seconds: Iterable[float]) -> WorkMetrics:
    each = list(seconds)
    return WorkMetrics(count=len(each), mean_seconds=sum(each) / max(1, len(each)))


def _whole_clip_seconds(span: Span) -> float:
    """Return the seconds that an action would take for a whole clip.

    For example, the result is 4 s if a DECODE of half of the clip's frames took 2 s.
    """
    return (span.end - span.start) / span.action.fraction


def _forecast(costs: CostModel | None, schedule: Schedule | None, world_size: int) -> float | None:
    if schedule is None or costs is None:
        return None
    try:
        return summarise(simulate_schedule(schedule, costs), world_size).makespan
    # the simulation raises an error if transfers between hosts were not measured
    except (RequestError, ValueError):
        return None


def average_costs(
    config: PipelineConfig,
    traces: Sequence[Trace],
    *,
    average: Callable[[Iterable[float]], float] = statistics.fmean,
    per_rank: bool = True,
    **fields: Any,
) -> CostModel:
    """Return the average costs of a clip's encode, step, decode and transfer in `traces`.

    Args:
        config: Configuration of the traced run.
        traces: One or more traces that contain steps.
        average: Function that averages the seconds of one kind of work.
        per_rank: Whether ranks get separate costs if their seconds of a step differ by more than a
            tenth. A rank without steps is assumed to be as fast as the other ranks.
        fields: Further fields of the returned `CostModel`.
    """
    host_of = CostModel(ranks_per_host=fields.get("ranks_per_host")).host_of
    transfers: dict[bool, list[float]] = {False: [], True: []}
    for packet in (packet for trace in traces for packet in trace.received):
        crosses = host_of(packet.rank) != host_of(packet.peer)
        transfers[crosses].append(packet.end - packet.start)
    transfer = average(transfers[False] or [0.0])
    steps = defaultdict[int, list[float]](list)
    for each in (each for trace in traces for each in trace.steps):
        steps[each.rank].append(each.end - each.start)

    def step(seconds: Iterable[float]) -> float:
        paired = config.parallel.cfg_parallel_size == 2
        return step_from_pair(average(seconds), transfer) if paired else average(seconds)

    usual = step([seconds for times in steps.values() for seconds in times])
    ranks = range(config.world_size)
    slowness = [step(steps[rank]) / usual if rank in steps else 1.0 for rank in ranks]
    differs = per_rank and max(slowness) > _SAME_SPEED * min(slowness)

    def on_ranks(seconds: float) -> PerRank:
        return tuple(seconds * slow for slow in slowness) if differs else seconds

    def action(kind: Kind) -> PerRank:
        spans = [span for trace in traces for span in trace.spans if span.action.kind is kind]
        seconds = [
            _whole_clip_seconds(span) / (slowness[span.rank] if differs else 1.0) for span in spans
        ]
        return on_ranks(average(seconds or [0.0]))

    return CostModel(
        step_seconds=on_ranks(usual),
        encode_seconds=action(Kind.ENCODE),
        decode_seconds=action(Kind.DECODE),
        transfer_seconds=transfer,
        inter_host_transfer_seconds=average(transfers[True]) if transfers[True] else None,
        **fields,
    )


_RUN_METRICS = TypeAdapter(RunMetrics)


def parse_run_metrics(manifest: Mapping[str, Any], where: str) -> RunMetrics | None:
    """Return the metrics in a run's manifest (`run.json`); None if the manifest has no metrics.

    Args:
        manifest: Content of a `run.json`.
        where: Path of the file, for errors.

    Returns:
        Metrics; None if the manifest has none.

    Raises:
        InputError: The metrics are damaged.
    """
    values = manifest.get("measured")
    if values is None:
        return None
    try:
        return _RUN_METRICS.validate_python(values)
    except RequestError as error:
        what, details = error.message, error.details
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc'])) or 'it'} {describe_fault(first)}"
        details = fault_details(first)
    raise InputError(f"{where}: the run's metrics are damaged: {what}", details=details)


def rounded(value: Any) -> Any:
    """Return a JSON value with its numbers rounded to six significant digits, for smaller files.

    Args:
        value: JSON value.
    """
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.6g}"))
