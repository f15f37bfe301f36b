"""The choice by forecast of the best layout that fits, and of each rank's card."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from svdpp.errors import RequestError
from svdpp.plan.costs import Costs, PerRank
from svdpp.plan.large_forecast import makespan_and_latency
from svdpp.plan.layout import SPLITS, Layout
from svdpp.plan.replicas import divisors

# Longer replicas are not tried: the cost of a forecast grows with the square of the length, and
# they promise no gain.
_MAX_REPLICA_SIZE = 64
# Times whose ratio is below this count as equal; the simplest layout wins.
_EQUAL = 1.001
# What the rate may lose for a lower latency, where that is what matters.
_RATE_KEPT = 0.9
# A reason names the card of each rank up to this many ranks.
_MAX_NAMED_CARDS = 16


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout, and the reason for it in one line."""

    layout: Layout
    reason: str
    cards: tuple[int, ...] = ()
    """The card of each rank, by rank; empty: rank r takes card r."""


class _Candidate(NamedTuple):
    layout: Layout
    seconds: float
    """Until all clips are finished."""
    latency: float
    """Mean of one clip, from its start."""

    def against(self, other: _Candidate, num_clips: int) -> str:
        """The times of both, in words."""
        return (
            f"a clip takes {self.latency:.4g} s and {_clips(num_clips)} {self.seconds:.4g} s, with "
            f"{other.layout} {other.latency:.4g} s and {other.seconds:.4g} s"
        )


#: Whether layouts of pairs are candidates too; `unproven`: for the reason only, because their bits
#: may differ.
Pairs = Literal["no", "exact", "unproven"]


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
    pairs: Pairs = "no",
    fixed: Mapping[str, Any] | None = None,
    sooner: bool = False,
) -> Choice:
    """The best layout by forecast of those that fit in memory.

    That is the one that finishes `num_clips` clips first; with `sooner` the one whose clips take
    the least time each, of those whose rate is at least 0.9 of the best.

    If rank r on card r does not fit, ranks that need more get cards that have more. If some card
    has room for both experts of a model, layouts in which a rank holds both count as well.

    `memory_gib` is what each of the W cards has; empty: unknown. Without `share_experts` a rank
    of a longer replica holds both experts only if its card is known to have room. `fixed` are the
    fields of the only layout; what is left to choose is then whether its ranks are pairs.
    """
    single = Layout(
        num_steps=num_steps,
        world_size=world_size,
        replicas=max(1, world_size // max(1, cfg_parallel)),
        cfg_parallel=cfg_parallel,
        costs=costs,
        decodes=decodes,
        expert_boundary=expert_boundary,
        share_experts=share_experts,
    )
    paired = _paired(single) if pairs != "no" else []
    wholes = [single, *paired] if pairs == "exact" else [single]

    def fits(layouts: Sequence[Layout]) -> list[Layout]:
        return [layout for layout in layouts if _cards(layout, memory_gib) is not None]

    # If the fixed layout is impossible, its error says why.
    layouts = _all_candidates(wholes, fixed) or [replace(single, **(fixed or {}))]
    unproven = fits(_all_candidates(paired, fixed)) if pairs == "unproven" else []
    in_memory = fits(layouts)
    num_left_out = len(layouts) - len(in_memory)
    if fixed is None:
        in_memory += [each for whole in wholes for each in _shared_candidates(whole, memory_gib)]
    if not in_memory:
        raise _nothing_fits(layouts, memory_gib)
    # If no layout has known transfer costs, the forecast of the first names the missing one.
    fitting = [layout for layout in in_memory if _has_known_transfers(layout)] or in_memory[:1]
    num_unknown = len(in_memory) - len(fitting)
    candidates = _forecast(fitting, num_clips)
    best = _best(candidates, sooner=sooner)
    layout, cards = best.layout, _cards(best.layout, memory_gib) or ()
    remarks = [
        _reason(num_clips, best, candidates, sooner=sooner),
        _unproven(num_clips, best, unproven, sooner=sooner),
        f"{world_size} ranks form no pairs" if pairs != "no" and not paired else "",
        _held_experts(layout),
        f"{num_left_out} of {len(layouts)} layouts need more memory" if num_left_out else "",
        _needs_of_data_parallel(single) if layouts[0] is not in_memory[0] else "",
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


def _paired(single: Layout) -> list[Layout]:
    """Data parallel of pairs; nothing if the ranks form none."""
    per_host = single.costs.ranks_per_host or 2
    if single.world_size % 2 or per_host % 2:
        return []
    return [replace(single, replicas=single.world_size // 2, cfg_parallel=2)]


def _all_candidates(wholes: Sequence[Layout], fixed: Mapping[str, Any] | None) -> list[Layout]:
    if fixed is None:
        return [layout for whole in wholes for layout in _candidates(whole)]
    layouts = []
    for whole in wholes:
        with suppress(RequestError):
            layouts.append(replace(whole, **fixed))
    return layouts


def _forecast(layouts: Sequence[Layout], num_clips: int) -> list[_Candidate]:
    return [_Candidate(each, *makespan_and_latency(each, num_clips)) for each in layouts]


def _best(candidates: Sequence[_Candidate], *, sooner: bool) -> _Candidate:
    """The first of those that no other exceeds by more than the rule allows."""
    if sooner:
        kept = _least(candidates, lambda each: each.seconds, 1 / _RATE_KEPT)
        candidates = _least(kept, lambda each: each.latency)
    return _least(candidates, lambda each: each.seconds)[0]


def _least(
    candidates: Sequence[_Candidate], key: Callable[[_Candidate], float], factor: float = _EQUAL
) -> list[_Candidate]:
    """Those whose time is at most `factor` times the least."""
    most = min(map(key, candidates)) * factor
    return [each for each in candidates if key(each) <= most]


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


def _reason(
    num_clips: int, best: _Candidate, candidates: Sequence[_Candidate], *, sooner: bool
) -> str:
    rivals = [each for each in candidates if each is not best]
    if not rivals:
        return "no other layout is possible"
    size = best.layout.cfg_parallel
    others = [each for each in rivals if each.layout.cfg_parallel != size]
    fastest = min(rivals, key=lambda each: each.seconds)
    if others:
        return best.against(_best(others, sooner=sooner), num_clips)
    if fastest.seconds * _EQUAL < best.seconds:
        return best.against(fastest, num_clips)
    if fastest.seconds <= best.seconds * _EQUAL:
        return f"no other layout finishes {_clips(num_clips)} sooner, and none is simpler"
    return (
        f"the next best, {fastest.layout}, takes {fastest.seconds / best.seconds - 1:.1%} longer "
        f"for {_clips(num_clips)}"
    )


def _unproven(num_clips: int, best: _Candidate, pairs: Sequence[Layout], *, sooner: bool) -> str:
    """What `--cfg-parallel 2` would give, if its bits are not known to be equal."""
    known = [layout for layout in pairs if _has_known_transfers(layout)]
    if not known:
        return ""
    pair = _best(_forecast(known, num_clips), sooner=sooner)
    return (
        f"with --cfg-parallel 2 ({pair.layout}) a clip would take {pair.latency:.4g} s and "
        f"{_clips(num_clips)} {pair.seconds:.4g} s, not {best.latency:.4g} and "
        f"{best.seconds:.4g}; it divides a batch, so bits may differ: svdpp doctor tries it"
    )


def _clips(num_clips: int) -> str:
    return f"{num_clips} clip{'s' if num_clips > 1 else ''}"


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
