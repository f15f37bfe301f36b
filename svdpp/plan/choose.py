"""The choice by forecast of the best layout that fits, and the comparison of layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from svdpp.errors import RequestError
from svdpp.plan.costs import Costs, PerRank
from svdpp.plan.forecast import Forecast
from svdpp.plan.large_forecast import forecast_layout, makespan_and_latency, steady_seconds_per_clip
from svdpp.plan.layout import SPLITS, Layout
from svdpp.plan.split import check_counts, divisors

# Longer replicas are not tried: the cost of a forecast grows with the square of the length, and
# they promise no gain.
_MAX_REPLICA_SIZE = 64
# Times whose ratio is below this count as equal; the simplest layout wins.
_EQUAL = 1.001
# What the rate may lose for a lower latency, where that is what matters.
_RATE_KEPT = 0.9

#: Whether layouts of pairs are candidates too; `unproven`: for the reason only, because their bits
#: may differ.
Pairs = Literal["no", "exact", "unproven"]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout, and the reason for it in one line."""

    layout: Layout
    reason: str


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
    the least time each, of those whose rate is at least 0.9 of the best. If some rank has room for
    both experts of a model, layouts in which a rank holds both count as well.

    `memory_gib` is what each of the W ranks has; empty: unknown. Without `share_experts` a rank
    of a longer replica holds both experts only if it is known to have room. `fixed` are the
    fields of the only layout; what is left to choose is then whether its ranks are pairs.
    """
    data_parallel = Layout(
        num_steps=num_steps,
        world_size=world_size,
        replicas=max(1, world_size // max(1, cfg_parallel)),
        cfg_parallel=cfg_parallel,
        costs=costs,
        decodes=decodes,
        expert_boundary=expert_boundary,
        share_experts=share_experts,
    )
    return _Search(data_parallel, num_clips, memory_gib, pairs, fixed, sooner).choice()


class _Candidate(NamedTuple):
    layout: Layout
    seconds: float
    """Until all clips are finished."""
    latency: float
    """Mean of one clip, from its start."""

    def against(self, other: _Candidate, num_clips: int) -> str:
        return (
            f"a clip takes {self.latency:.4g} s and {_clips(num_clips)} {self.seconds:.4g} s, with "
            f"{other.layout} {other.latency:.4g} s and {other.seconds:.4g} s"
        )


@dataclass(frozen=True)
class _Search:
    """What `choose_layout` is asked: the ranks as data parallel, and what limits the choice."""

    data_parallel: Layout
    num_clips: int
    memory_gib: Sequence[float]
    pairs: Pairs
    fixed: Mapping[str, Any] | None
    sooner: bool

    def choice(self) -> Choice:
        paired = self._paired()
        wholes = [self.data_parallel, *(paired if self.pairs == "exact" else [])]
        # If the fixed layout is impossible, its error says why.
        possible = self._layouts(wholes) or [replace(self.data_parallel, **(self.fixed or {}))]
        fitting = [*filter(self._fits, possible), *self._with_shared_experts(wholes)]
        if not fitting:
            raise self._nothing_fits(possible)
        # If no layout has known transfer costs, the forecast of the first names the missing one.
        candidates = self._forecast(filter(_has_known_transfers, fitting)) or self._forecast(
            fitting[:1]
        )
        best = self._best(candidates)
        remarks = [
            self._why(best, candidates),
            self._unproven(best, paired),
            f"{best.layout.world_size} ranks form no pairs"
            if self.pairs != "no" and not paired
            else "",
            *self._left_out(best.layout, possible, len(fitting) - len(candidates)),
        ]
        reason = f"{best.layout}: {'; '.join(filter(None, remarks))}"
        return Choice(layout=best.layout, reason=reason)

    # --- the layouts ----------------------------------------------------------------------------

    def _paired(self) -> list[Layout]:
        whole = self.data_parallel
        per_host = whole.costs.ranks_per_host or 2
        if self.pairs == "no" or whole.world_size % 2 or per_host % 2:
            return []
        return [replace(whole, replicas=whole.world_size // 2, cfg_parallel=2)]

    def _layouts(self, wholes: Sequence[Layout]) -> list[Layout]:
        if self.fixed is None:
            return [layout for whole in wholes for layout in _candidates(whole)]
        layouts = []
        for whole in wholes:
            with suppress(RequestError):
                layouts.append(replace(whole, **self.fixed))
        return layouts

    def _with_shared_experts(self, wholes: Sequence[Layout]) -> Iterator[Layout]:
        """Layouts that fit with a rank of a longer replica that holds both experts."""
        whole = self.data_parallel
        is_asked = self.fixed is None and self.memory_gib and not whole.share_experts
        if not is_asked or whole.expert_boundary is None:
            return
        for layout in self._layouts([replace(each, share_experts=True) for each in wholes]):
            if (
                layout.replica_size > 1
                and any(len(role.experts) > 1 for role in layout.roles)
                and None not in layout.peak_gib
                and self._fits(layout)
            ):
                yield layout

    def _fits(self, layout: Layout) -> bool:
        pairs = zip(layout.peak_gib, self.memory_gib, strict=True) if self.memory_gib else ()
        return all((needs or 0.0) <= has for needs, has in pairs)

    def _forecast(self, layouts: Iterator[Layout] | Sequence[Layout]) -> list[_Candidate]:
        return [_Candidate(each, *makespan_and_latency(each, self.num_clips)) for each in layouts]

    def _best(self, candidates: Sequence[_Candidate]) -> _Candidate:
        if self.sooner:
            kept = _least(candidates, lambda each: each.seconds, 1 / _RATE_KEPT)
            candidates = _least(kept, lambda each: each.latency)
        return _least(candidates, lambda each: each.seconds)[0]

    # --- the reason -----------------------------------------------------------------------------

    def _why(self, best: _Candidate, candidates: Sequence[_Candidate]) -> str:
        rivals = [each for each in candidates if each is not best]
        if not rivals:
            return "no other layout is possible"
        size = best.layout.cfg_parallel
        others = [each for each in rivals if each.layout.cfg_parallel != size]
        fastest = min(rivals, key=lambda each: each.seconds)
        if others:
            return best.against(self._best(others), self.num_clips)
        if fastest.seconds * _EQUAL < best.seconds:
            return best.against(fastest, self.num_clips)
        clips = _clips(self.num_clips)
        if fastest.seconds <= best.seconds * _EQUAL:
            return f"no other layout finishes {clips} sooner, and none is simpler"
        longer = fastest.seconds / best.seconds - 1
        return f"the next best, {fastest.layout}, takes {longer:.1%} longer for {clips}"

    def _unproven(self, best: _Candidate, paired: Sequence[Layout]) -> str:
        """What `--cfg-parallel 2` would give, if its bits are not known to be equal."""
        layouts = filter(self._fits, self._layouts(paired) if self.pairs == "unproven" else [])
        pairs = self._forecast(filter(_has_known_transfers, layouts))
        if not pairs:
            return ""
        pair = self._best(pairs)
        return (
            f"with --cfg-parallel 2 ({pair.layout}) a clip would take {pair.latency:.4g} s and "
            f"{_clips(self.num_clips)} {pair.seconds:.4g} s, not {best.latency:.4g} and "
            f"{best.seconds:.4g}; it divides a batch, so bits may differ: svdpp doctor tries it"
        )

    def _left_out(
        self, best: Layout, possible: Sequence[Layout], num_unknown: int
    ) -> Iterator[str]:
        if best.expert_boundary is not None:
            num_both = sum(len(role.experts) > 1 for role in best.roles)
            yield f"{num_both} of {best.world_size} ranks hold both experts"
        too_large = [layout for layout in possible if not self._fits(layout)]
        if too_large:
            yield f"{len(too_large)} of {len(possible)} layouts need more memory"
        if num_unknown:
            yield (
                f"{num_unknown} of {len(possible)} layouts have transfers between hosts, whose "
                "time the costs do not give: set --inter-host-transfer-seconds"
            )
        if self.memory_gib and None in best.peak_gib:
            yield "the costs do not give its memory"

    def _nothing_fits(self, layouts: Sequence[Layout]) -> RequestError:
        least = min(max(peak or 0.0 for peak in layout.peak_gib) for layout in layouts)
        smallest, largest = min(self.memory_gib), max(self.memory_gib)
        has = " to ".join(f"{each:.4g}" for each in sorted({smallest, largest}))
        return RequestError(
            f"no layout of {layouts[0].world_size} ranks fits in {has} GiB a rank: the smallest "
            f"one needs {least:.4g}",
            "use a smaller --decode-chunk-size, fewer --frames, a smaller --height and --width, or "
            "--memory-opt",
            details={"asked": least, "free": smallest},
        )


def _least(
    candidates: Sequence[_Candidate], key: Callable[[_Candidate], float], factor: float = _EQUAL
) -> list[_Candidate]:
    """Those whose time is at most `factor` times the least."""
    most = min(map(key, candidates)) * factor
    return [each for each in candidates if key(each) <= most]


def _clips(num_clips: int) -> str:
    return f"{num_clips} clip{'s' if num_clips > 1 else ''}"


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
                with suppress(RequestError):  # only the uniform rule refuses these counts
                    yield replace(data_parallel, split=split, replicas=replicas, decoders=decoders)


def decoders_needed(num_steps: int, replica_size: int, costs: Costs) -> int:
    """The least number of decoders whose decodes fit in an equal share of the work."""
    encode, decode = _mean(costs.encode_seconds), _mean(costs.decode_seconds)
    share = (encode + num_steps * _mean(costs.step_seconds) + decode) / replica_size
    return max(1, math.ceil(decode / share))


def _mean(value: PerRank) -> float:
    return math.fsum(value) / len(value) if isinstance(value, tuple) else value


def _has_known_transfers(layout: Layout) -> bool:
    host, links = layout.costs.host_of, (*layout.links, *layout.decode_links)
    crosses = any(host(source) != host(target) for source, target in links)
    return not crosses or layout.costs.inter_host_transfer_seconds is not None


# --- the comparison of layouts, side by side ------------------------------------------------------


class Row(NamedTuple):
    """One layout of a comparison.

    A layout that cannot run has no forecast, and its note gives the reason. Otherwise the note
    says why the layout was chosen, or which rank has too little memory for it.
    """

    name: str
    layout: Layout | None = None
    forecast: Forecast | None = None
    seconds_per_clip: float = 0.0
    """Mean time between finished clips in a long queue."""
    note: str = ""


def compare_layouts(
    *,
    num_clips: int,
    memory_gib: Sequence[float] = (),
    pairs: Pairs = "no",
    sooner: bool = False,
    **counts: Any,
) -> list[Row]:
    """The layouts that `plan --compare` shows, by the arguments of `choose_layout`.

    They are one replica with each split, one with several decoders, the layout of `choose_layout`,
    and data parallel.
    """
    num_steps, world_size, costs = (counts[key] for key in ("num_steps", "world_size", "costs"))
    check_counts(num_steps, world_size)
    costs.check_world(world_size)
    decoders = min(world_size, max(2, decoders_needed(num_steps, world_size, costs)))
    known = pairs if pairs == "exact" else "no"  # else the last row says it
    named: dict[str, dict[str, Any] | None] = {
        **{split: {"split": split} for split in SPLITS},
        f"{decoders} decoders": {"split": "alternating", "decoders": decoders},
        "auto": None,
        "data parallel": {"replicas": world_size},
        **({} if world_size % 2 else {"pairs": {"replicas": world_size // 2, "cfg_parallel": 2}}),
    }
    rows = []
    for name, options in named.items():
        try:
            if options is None:
                choice = choose_layout(
                    num_clips=num_clips,
                    memory_gib=memory_gib,
                    pairs=known,
                    sooner=sooner,
                    **counts,
                )
                layout, note = choice.layout, choice.reason
            else:
                layout = Layout(**counts, **options)
                note = _needs_more(layout, memory_gib)
            forecast = forecast_layout(layout, num_clips)
            rows.append(Row(name, layout, forecast, steady_seconds_per_clip(layout), note))
        except RequestError as error:
            rows.append(Row(name, note=error.message))
    return rows


def _needs_more(layout: Layout, memory_gib: Sequence[float]) -> str:
    if not memory_gib:
        return ""
    for rank, (has, needs) in enumerate(zip(memory_gib, layout.peak_gib, strict=False)):
        if needs is not None and needs > has:
            return f"rank {rank} needs {needs:.4g} GiB and has {has:.4g}"
    return ""
