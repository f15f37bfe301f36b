"""The choice by forecast of the fastest layout that fits, and of each rank's card."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from svdpp.errors import RequestError
from svdpp.plan.costs import Costs, PerRank
from svdpp.plan.large_forecast import makespan
from svdpp.plan.layout import SPLITS, Layout
from svdpp.plan.replicas import divisors

# Longer replicas are not tried: the cost of a forecast grows with the square of the length, and
# they promise no gain.
_MAX_REPLICA_SIZE = 64
# Times whose ratio is below this count as equal; the simplest layout wins.
_EQUAL = 1.001
# A reason names the card of each rank up to this many ranks.
_MAX_NAMED_CARDS = 16


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout, and the reason for it in one line."""

    layout: Layout
    reason: str
    cards: tuple[int, ...] = ()
    """The card of each rank, by rank; empty: rank r takes card r."""


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
    cfg_parallel: int = 1,
) -> Choice:
    """The layout that fits in memory and, by forecast, finishes `num_clips` clips first.

    If rank r on card r does not fit, ranks that need more get cards that have more. If some card
    has room for both experts of a model, layouts in which a rank holds both count as well.

    `memory_gib` is what each of the W cards has; empty: unknown. Without `share_experts` a rank
    of a longer replica holds both experts only if its card is known to have room.
    """
    whole = Layout(
        num_steps=num_steps,
        world_size=world_size,
        replicas=max(1, world_size // max(1, cfg_parallel)),
        cfg_parallel=cfg_parallel,
        costs=costs,
        decodes=decodes,
        expert_boundary=expert_boundary,
        share_experts=share_experts,
    )
    layouts = list(_candidates(whole))
    in_memory = [layout for layout in layouts if _cards(layout, memory_gib) is not None]
    num_left_out = len(layouts) - len(in_memory)
    in_memory += _shared_candidates(whole, memory_gib)
    if not in_memory:
        raise _nothing_fits(layouts, memory_gib)
    # If no layout has known transfer costs, the forecast of the first names the missing one.
    fitting = [layout for layout in in_memory if _has_known_transfers(layout)] or in_memory[:1]
    num_unknown = len(in_memory) - len(fitting)
    seconds = [makespan(layout, num_clips) for layout in fitting]
    chosen = next(i for i, each in enumerate(seconds) if each <= min(seconds) * _EQUAL)
    layout, soonest = fitting.pop(chosen), seconds.pop(chosen)
    cards = _cards(layout, memory_gib) or ()
    remarks = [
        _reason(num_clips, soonest, list(zip(seconds, map(str, fitting), strict=True))),
        _held_experts(layout),
        f"{num_left_out} of {len(layouts)} layouts need more memory" if num_left_out else "",
        _needs_of_data_parallel(whole) if layouts[0] is not in_memory[0] else "",
        f"{num_unknown} of {len(layouts)} layouts have transfers between hosts, whose time the "
        "costs do not give: set --inter-host-transfer-seconds"
        if num_unknown
        else "",
        "the costs do not give its memory" if memory_gib and None in layout.peak_gib else "",
        _named_cards(cards),
    ]
    return Choice(
        layout=layout, reason=f"{layout}: {'; '.join(filter(None, remarks))}", cards=cards
    )


def _cards(layout: Layout, memory_gib: Sequence[float]) -> tuple[int, ...] | None:
    """The card of each rank, empty for rank r on card r; None if the layout does not fit."""
    if not memory_gib:
        return ()
    needs = [peak or 0.0 for peak in layout.peak_gib]
    cards = assign_cards(needs, memory_gib)
    is_in_order = cards == tuple(range(layout.world_size))
    # Costs of single ranks, and hosts, hold for rank r on card r only.
    is_fixed = layout.costs.differ_by_rank or layout.costs.ranks_per_host is not None
    if cards is None or (is_fixed and not is_in_order):
        return None
    return () if is_in_order else cards


def _shared_candidates(whole: Layout, memory_gib: Sequence[float]) -> list[Layout]:
    """Layouts that fit with a rank of a longer replica that holds both experts."""
    if not memory_gib or whole.expert_boundary is None or whole.share_experts:
        return []
    return [
        layout
        for layout in _candidates(replace(whole, share_experts=True))
        if layout.replica_size > 1
        and any(len(role.experts) > 1 for role in layout.roles)
        and None not in layout.peak_gib
        and _cards(layout, memory_gib) is not None
    ]


def _nothing_fits(layouts: Sequence[Layout], memory_gib: Sequence[float]) -> RequestError:
    least = min(max(peak or 0.0 for peak in layout.peak_gib) for layout in layouts)
    smallest, largest = min(memory_gib), max(memory_gib)
    what = f"in {smallest:.4g} GiB a rank: the smallest one needs {least:.4g}"
    if smallest < largest:
        what = (
            f"on cards of {smallest:.4g} to {largest:.4g} GiB: the smallest one needs {least:.4g} "
            "for one of its ranks"
        )
    return RequestError(
        f"no layout of {layouts[0].world_size} ranks fits {what}",
        "use a smaller --decode-chunk-size, fewer --frames, a smaller --height and --width, or "
        "--memory-opt",
        details={"asked": least, "free": smallest},
    )


def _named_cards(cards: Sequence[int]) -> str:
    if not cards:
        return ""
    larger = "larger cards take larger parts"
    if len(cards) > _MAX_NAMED_CARDS:
        return larger
    return f"{larger}: ranks 0 to {len(cards) - 1} take cards {', '.join(map(str, cards))}"


def faster_layout(layout: Layout, num_clips: int, *, by: float) -> tuple[Layout, float] | None:
    """The layout that finishes `num_clips` clips first, and its speedup over `layout`.

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
            cfg_parallel=layout.cfg_parallel,
        ).layout
        times = makespan(layout, num_clips) / makespan(best, num_clips)
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


def _needs_of_data_parallel(layout: Layout) -> str:
    """The memory of data parallel with two experts; empty for a model with one."""
    if layout.expert_boundary is None:
        return ""
    needs = max(peak or 0.0 for peak in layout.peak_gib)
    return f"data parallel needs {needs:.4g} GiB, with both experts on each rank"


def _held_experts(layout: Layout) -> str:
    """How many ranks hold both experts; empty for a model with one."""
    if layout.expert_boundary is None:
        return ""
    num_both = sum(len(role.experts) > 1 for role in layout.roles)
    if not num_both:
        return "each rank holds one expert at most"
    if num_both == layout.world_size:
        return "each rank holds both experts"
    return f"{num_both} of {layout.world_size} ranks hold both experts"


def _candidates(data_parallel: Layout) -> Iterator[Layout]:
    """Layouts to forecast, the simplest first: short replicas, one decoder, equal ranges."""
    num_steps, num_units = data_parallel.num_steps, data_parallel.replicas
    for replica_size in divisors(num_units):
        if replica_size > min(_MAX_REPLICA_SIZE, num_steps + 2) and replica_size > 1:
            return
        needed = 1
        if data_parallel.decodes:
            needed = decoders_needed(num_steps, replica_size, data_parallel.costs)
        for decoders in sorted({1, needed} - ({replica_size} if replica_size > 1 else set())):
            for split in SPLITS if replica_size > 1 else SPLITS[:1]:
                replicas = num_units // replica_size
                try:
                    layout = replace(
                        data_parallel, split=split, replicas=replicas, decoders=decoders
                    )
                except RequestError:
                    continue  # only the uniform rule refuses these counts
                yield layout


def decoders_needed(num_steps: int, replica_size: int, costs: Costs) -> int:
    """The least number of decoders whose decodes fit in an equal share of the work."""
    encode, decode = _mean(costs.encode_seconds), _mean(costs.decode_seconds)
    share = (encode + num_steps * _mean(costs.step_seconds) + decode) / replica_size
    return max(1, math.ceil(decode / share))


def _mean(value: PerRank) -> float:
    return math.fsum(value) / len(value) if isinstance(value, tuple) else value


def _has_known_transfers(layout: Layout) -> bool:
    """Whether the costs give the time of each of its transfers."""
    links = *layout.links, *layout.decode_links
    return all(layout.costs.knows_transfer(source, target) for source, target in links)


def assign_cards(needs: Sequence[float], has: Sequence[float]) -> tuple[int, ...] | None:
    """The card of each rank, such that every rank has the memory that it needs.

    It is rank r on card r if that fits. Otherwise a rank that needs more gets a card that has more;
    if any assignment fits, this one does.

    Returns:
        The card of each rank, by rank; None if no assignment fits.
    """
    ranks = range(len(needs))
    if _all_fit(needs, has):
        return tuple(ranks)
    by_need = sorted(ranks, key=needs.__getitem__)
    by_room = sorted(ranks, key=has.__getitem__)
    card_of = dict(zip(by_need, by_room, strict=True))
    cards = tuple(card_of[rank] for rank in ranks)
    return cards if _all_fit(needs, [has[card] for card in cards]) else None


def _all_fit(needs: Sequence[float], has: Sequence[float]) -> bool:
    return all(need <= room for need, room in zip(needs, has, strict=True))
