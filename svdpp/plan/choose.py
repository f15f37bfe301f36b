"""Owns the choice of a layout by forecast, and the comparison of layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from svdpp.errors import RequestError
from svdpp.plan.costs import Costs, PerRank
from svdpp.plan.draft import DraftPlan
from svdpp.plan.draft_starts import default_start_steps
from svdpp.plan.forecast import Forecast, replay, sum_up, summarise
from svdpp.plan.large_forecast import forecast_layout, steady_seconds_per_clip
from svdpp.plan.layout import SPLITS, Layout
from svdpp.plan.replicas import divisors
from svdpp.plan.split import check_counts

# Longer replicas are not tried: the cost of a forecast grows with the square of the length, and
# they promise no gain.
_MAX_REPLICA_SIZE = 64
# A forecast covers this many clips for each rank, at most `_LARGE_SAMPLE` in all, and extrapolates
# the rest at a constant time per clip.
_SAMPLE_PER_RANK = 16
_LARGE_SAMPLE = 65_536
# Drafts in a queue; enough that the time per clip is constant.
_QUEUED_DRAFTS = 8
# Times whose ratio is below this count as equal; the simplest layout wins.
_EQUAL = 1.001


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout, and the reason for it in one line."""

    layout: Layout
    reason: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout of a comparison.

    A layout that cannot run has no forecast, and its note gives the reason. Otherwise the note
    says why the layout was chosen, or which rank has too little memory for it.
    """

    name: str
    layout: Layout | None = None
    draft_plan: DraftPlan | None = None
    """Set instead of `layout` if all ranks draft one clip at a time."""
    forecast: Forecast | None = None
    seconds_per_clip: float = 0.0
    """Mean time between finished clips in a long queue."""
    preview_seconds: float = 0.0
    """Mean latency until the first frames of a clip, from the same start as `forecast.latency`."""
    peak_gib: tuple[float | None, ...] = ()
    note: str = ""


def choose_layout(
    *,
    num_steps: int,
    world_size: int,
    num_clips: int,
    costs: Costs,
    decodes: bool = True,
    memory_gib: Sequence[float] = (),
    expert_boundary: int | None = None,
    share_experts: bool = False,
) -> Choice:
    """The layout that fits in memory and, by forecast, finishes `num_clips` clips first.

    Args:
        num_steps: N, of each clip.
        world_size: W.
        num_clips: M.
        costs: of each kind of work; memory is checked only if they include it.
        decodes: whether clips are decoded to frames.
        memory_gib: memory available to each rank, GiB; empty if unknown.
        expert_boundary: as in `Layout`.
        share_experts: as in `Layout`.

    Raises:
        RequestError: counts below 1, costs for another number of ranks, no layout that fits in
            memory, or no cost for the transfers between hosts.
    """
    whole = Layout(
        num_steps=num_steps,
        world_size=world_size,
        replicas=world_size,
        costs=costs,
        decodes=decodes,
        expert_boundary=expert_boundary,
        share_experts=share_experts,
    )
    layouts = list(_candidates(whole))
    in_memory = [layout for layout in layouts if not _needs_more(layout, memory_gib)]
    if not in_memory:
        least = min(max(peak or 0.0 for peak in layout.peak_gib) for layout in layouts)
        raise RequestError(
            f"no layout of {world_size} ranks fits in {min(memory_gib):.4g} GiB a rank: "
            f"the smallest one needs {least:.4g}",
            "use a smaller --decode-chunk-size, fewer --frames, a smaller --height and --width, or "
            "--memory-opt",
            details={"asked": least, "free": min(memory_gib)},
        )
    # If no layout has known transfer costs, the forecast of the first names the missing one.
    fitting = [layout for layout in in_memory if _has_known_transfers(layout)] or in_memory[:1]
    num_unknown = len(in_memory) - len(fitting)
    seconds = [_makespan(layout, num_clips) for layout in fitting]
    chosen = next(i for i, each in enumerate(seconds) if each <= min(seconds) * _EQUAL)
    layout, soonest = fitting.pop(chosen), seconds.pop(chosen)
    remarks = [_reason(num_clips, soonest, list(zip(seconds, map(str, fitting), strict=True)))]
    if expert_boundary is not None:
        remarks.append(_held_experts(layout))
    if left_out := len(layouts) - len(in_memory):
        remarks.append(f"{left_out} of {len(layouts)} layouts need more memory")
        if expert_boundary is not None and layouts[0] is not in_memory[0]:
            least = max(peak or 0.0 for peak in layouts[0].peak_gib)
            remarks.append(f"data parallel needs {least:.4g} GiB, with both experts on each rank")
    if num_unknown:
        remarks.append(
            f"{num_unknown} of {len(layouts)} layouts have transfers between hosts, whose time the "
            "costs do not give: set --inter-host-transfer-seconds"
        )
    if memory_gib and None in layout.peak_gib:
        remarks.append("the costs do not give its memory")
    return Choice(layout=layout, reason=f"{layout}: {'; '.join(remarks)}")


def faster_layout(layout: Layout, num_clips: int, *, by: float) -> tuple[Layout, float] | None:
    """The layout that finishes `num_clips` clips first, and its speedup over `layout`.

    Args:
        layout: the current layout; the other one has the same ranks, steps and costs.
        num_clips: M.
        by: the least speedup, such as 1.05.

    Returns:
        None if no layout is that much faster, or the costs lack a value for the forecast.
    """
    try:
        best = choose_layout(
            num_steps=layout.num_steps,
            world_size=layout.world_size,
            num_clips=num_clips,
            costs=layout.costs,
            decodes=layout.decodes,
            expert_boundary=layout.expert_boundary,
            share_experts=layout.share_experts,
        ).layout
        times = _makespan(layout, num_clips) / _makespan(best, num_clips)
    except RequestError:
        return None
    return (best, times) if times > by else None


def _reason(num_clips: int, seconds: float, rivals: Sequence[tuple[float, str]]) -> str:
    if not rivals:
        return "no other layout is possible"
    next_seconds, rival = min(rivals)
    clips = f"{num_clips} clip{'s' if num_clips > 1 else ''}"
    if next_seconds <= seconds * _EQUAL:
        return f"no other layout finishes {clips} sooner, and none is simpler"
    return f"the next best, {rival}, takes {next_seconds / seconds - 1:.1%} longer for {clips}"


def _held_experts(layout: Layout) -> str:
    """How many ranks hold both experts."""
    num_both = sum(len(role.experts) > 1 for role in layout.roles)
    if not num_both:
        return "each rank holds one expert at most"
    if num_both == layout.world_size:
        return "each rank holds both experts"
    return f"{num_both} of {layout.world_size} ranks hold both experts"


def compare_layouts(
    *,
    num_steps: int,
    world_size: int,
    num_clips: int,
    costs: Costs,
    arrivals: Sequence[float] = (),
    memory_gib: Sequence[float] = (),
    expert_boundary: int | None = None,
    share_experts: bool = False,
) -> list[Row]:
    """The layouts that `plan --compare` shows.

    They are one replica with each split, one with several decoders, the layout of `choose_layout`,
    data parallel, and a draft. Arguments as for `choose_layout` and `forecast_layout`.

    Raises:
        RequestError: counts below 1, or costs for another number of ranks.
    """
    check_counts(num_steps, world_size)
    costs.check_world(world_size)
    decoders = min(world_size, max(2, _decoders_needed(num_steps, world_size, costs)))
    counts: dict[str, Any] = {
        "num_steps": num_steps,
        "world_size": world_size,
        "costs": costs,
        "expert_boundary": expert_boundary,
        "share_experts": share_experts,
    }

    def build(**options: Any) -> Choice:
        layout = Layout(**counts, **options)
        return Choice(layout=layout, reason=_needs_more(layout, memory_gib))

    def row(name: str, choose: Callable[[], Choice]) -> Row:
        try:
            choice = choose()
            forecast = forecast_layout(choice.layout, num_clips, arrivals)
        except RequestError as error:
            return Row(name=name, note=error.message)
        return Row(
            name=name,
            layout=choice.layout,
            forecast=forecast,
            seconds_per_clip=steady_seconds_per_clip(choice.layout),
            preview_seconds=forecast.latency.mean,
            peak_gib=choice.layout.peak_gib,
            note=choice.reason,
        )

    auto = partial(choose_layout, **counts, num_clips=num_clips, memory_gib=memory_gib)
    draft = Row(name="draft", note="a draft needs a model with one expert")
    if expert_boundary is None:
        draft = _draft_row(num_steps, world_size, num_clips, costs, arrivals)
    return [
        *(row(split, partial(build, split=split)) for split in SPLITS),
        row(f"{decoders} decoders", partial(build, split="dithered", decoders=decoders)),
        row("auto", auto),
        row("data parallel", partial(build, replicas=world_size)),
        draft,
    ]


def _draft_row(
    num_steps: int, world_size: int, num_clips: int, costs: Costs, arrivals: Sequence[float]
) -> Row:
    """The row of a draft plan: all ranks work on one clip at a time."""
    try:
        draft_plan = DraftPlan(
            num_steps=num_steps, start_steps=default_start_steps(num_steps, world_size)
        )
        spans = replay(draft_plan.schedule(range(_QUEUED_DRAFTS)), costs)
    except RequestError as error:
        return Row(name="draft", note=error.message)
    queue = summarise(spans, world_size)
    ready = draft_plan.ready_at(costs)
    sooner = ready[0] - ready[-1]
    forecast = sum_up(
        list(_one_by_one(num_clips, queue.seconds_per_clip, ready[0], arrivals)),
        busy=num_clips * sum(span.end - span.start for span in spans) / _QUEUED_DRAFTS,
        world_size=world_size,
        num_finishers=1,
    )
    return Row(
        name="draft",
        draft_plan=draft_plan,
        forecast=forecast,
        seconds_per_clip=queue.seconds_per_clip,
        preview_seconds=forecast.latency.mean - sooner,
        peak_gib=draft_plan.peak_gib(costs),
        note=f"an approximation {sooner:.4g} s before the exact clip; {draft_plan}",
    )


def _one_by_one(
    num_clips: int, seconds_per_clip: float, latency: float, arrivals: Sequence[float]
) -> Iterator[tuple[float, float]]:
    """Start (arrival, if `arrivals` are given) and end of each clip in a queue of drafts."""
    free = 0.0
    for clip in range(num_clips):
        begun = max(free, arrivals[clip]) if arrivals else free
        yield (arrivals[clip] if arrivals else begun), begun + latency
        free = begun + seconds_per_clip


def _candidates(data_parallel: Layout) -> Iterator[Layout]:
    """Layouts to forecast, the simplest first: short replicas, one decoder, equal ranges."""
    num_steps, world_size = data_parallel.num_steps, data_parallel.world_size
    for replica_size in divisors(world_size):
        if replica_size > min(_MAX_REPLICA_SIZE, num_steps + 2) and replica_size > 1:
            return
        needed = 1
        if data_parallel.decodes:
            needed = _decoders_needed(num_steps, replica_size, data_parallel.costs)
        for decoders in sorted({1, needed} - ({replica_size} if replica_size > 1 else set())):
            for split in SPLITS if replica_size > 1 else SPLITS[:1]:
                replicas = world_size // replica_size
                try:
                    layout = replace(
                        data_parallel, split=split, replicas=replicas, decoders=decoders
                    )
                except RequestError:
                    continue  # only the uniform rule refuses these counts
                yield layout


def _decoders_needed(num_steps: int, replica_size: int, costs: Costs) -> int:
    """The least number of decoders whose decodes fit in an equal share of the work."""
    encode, decode = _mean(costs.encode_seconds), _mean(costs.decode_seconds)
    share = (encode + num_steps * _mean(costs.step_seconds) + decode) / replica_size
    return max(1, math.ceil(decode / share))


def _mean(value: PerRank) -> float:
    return math.fsum(value) / len(value) if isinstance(value, tuple) else value


def _needs_more(layout: Layout, memory_gib: Sequence[float]) -> str:
    """Names the first rank that is known to need more memory than it has; empty if none does."""
    if not memory_gib:
        return ""
    for rank, (has, needs) in enumerate(zip(memory_gib, layout.peak_gib, strict=False)):
        if needs is not None and needs > has:
            return f"rank {rank} needs {needs:.4g} GiB and has {has:.4g}"
    return ""


def _has_known_transfers(layout: Layout) -> bool:
    """Whether the costs give the time of each of its transfers."""
    return all(layout.costs.knows_transfer(source, target) for source, target in layout.links)


def _makespan(layout: Layout, num_clips: int) -> float:
    """Seconds until all clips are finished; beyond a sample, at a constant time per clip."""
    world_size = layout.world_size
    sample = max(2 * world_size, min(_SAMPLE_PER_RANK * world_size, _LARGE_SAMPLE))
    sample = min(num_clips, sample)
    forecast = forecast_layout(layout, sample)
    return forecast.makespan + (num_clips - sample) * forecast.seconds_per_clip
