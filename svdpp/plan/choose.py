"""Choice of the layout that fits in memory and is fastest by forecast; comparison of layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from svdpp.errors import RequestError, pluralize
from svdpp.plan.costs import CostModel, PerRank
from svdpp.plan.forecast import (
    Forecast,
    forecast_layout,
    makespan_and_latency,
    steady_seconds_per_clip,
)
from svdpp.plan.layout import Layout
from svdpp.plan.parallel import SPLITS
from svdpp.plan.split import check_counts, divisors

# Largest number of ranks in a replica (a group of ranks that makes whole clips) that the search
# tries. Layouts with larger replicas take long to forecast, and do not make clips faster.
_MAX_REPLICA_SIZE = 64
# Two durations count as equal if their ratio is at most this number. If several layouts are equally
# fast, the simplest is chosen.
_EQUAL = 1.001
# When the latency is minimised, only layouts with at least this fraction of the best throughput are
# considered.
_RATE_KEPT = 0.9


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Chosen layout, and the reason for it in one line."""

    layout: Layout
    reason: str


def choose_layout(
    *,
    num_clips: int,
    memory_gib: Sequence[float] = (),
    pairs: bool = False,
    fixed: Mapping[str, Any] | None = None,
    minimize_latency: bool = False,
    **counts: Any,
) -> Choice:
    """Choose, by forecast, the layout that fits in memory and finishes all clips first.

    A model may have two experts: denoisers for different steps. Usually each rank loads only one of
    them. If the memory is known, layouts in which a rank loads both are candidates too.

    Args:
        num_clips: Number of clips to forecast.
        memory_gib: Memory of each rank, in GiB. Empty: the memory is unknown, and every layout
            fits.
        pairs: Whether layouts with pairs (two ranks that share each step) are candidates too.
        fixed: Fields of the layout that the user has set, such as `{"split": "balanced"}`. If this
            argument is given, only one thing is left to choose: whether the ranks form pairs. None:
            all layouts are candidates.
        minimize_latency: Whether to choose the layout with the least latency of a clip, among the
            layouts with at least 0.9 of the best throughput.
        counts: Fields of `Layout` that all candidates share, such as `num_steps`, `world_size` and
            `costs`.

    Raises:
        RequestError: No layout is possible, or no layout fits in memory.
    """
    units = counts["world_size"] // max(1, counts.get("cfg_parallel_size", 1))
    data_parallel = Layout(**counts, data_parallel_size=max(1, units))
    return _Search(data_parallel, num_clips, memory_gib, pairs, fixed, minimize_latency).choice()


class _Candidate(NamedTuple):
    layout: Layout
    seconds: float
    """Seconds until all clips are finished."""
    latency: float
    """Mean seconds from the start to the end of a clip."""


@dataclass(frozen=True)
class _Search:
    """Search for the best layout. All fields after the first are arguments of `choose_layout`."""

    data_parallel: Layout
    """Layout in which each rank makes whole clips; all candidates are changed copies of it."""
    num_clips: int
    memory_gib: Sequence[float]
    pairs: bool
    fixed: Mapping[str, Any] | None
    minimize_latency: bool

    def choice(self) -> Choice:
        wholes = [self.data_parallel, *self._paired()]
        # `_layouts` leaves out impossible layouts. If it returns nothing, the fixed layout is
        # created again here, to raise the error that tells the user why it is impossible.
        possible = self._layouts(wholes) or [replace(self.data_parallel, **(self.fixed or {}))]
        shared = [*self._with_shared_experts(wholes)]
        fitting = [*filter(self._fits, possible), *shared]
        possible += shared
        if not fitting:
            raise self._nothing_fits(possible)
        # If no layout has known transfer costs, the forecast of the first layout raises an error
        # that says so.
        known = [*filter(_has_known_transfers, fitting)] or fitting[:1]
        clips = self.num_clips
        candidates = [_Candidate(each, *makespan_and_latency(each, clips)) for each in known]
        best = self._best(candidates)
        remarks = [self._why(best, candidates)]
        remarks += self._remarks(best.layout, possible, len(fitting) - len(candidates))
        reason = f"{best.layout}: {'; '.join(remarks)}"
        return Choice(layout=best.layout, reason=reason)

    # --- candidate layouts ----------------------------------------------------------------------

    def _paired(self) -> list[Layout]:
        """Return the layout in which each pair makes whole clips; empty if pairs cannot be used."""
        whole = self.data_parallel
        per_host = whole.costs.ranks_per_host or 2
        if not self.pairs or whole.world_size % 2 or per_host % 2:
            return []
        return [replace(whole, data_parallel_size=whole.world_size // 2, cfg_parallel_size=2)]

    def _layouts(self, wholes: Sequence[Layout]) -> list[Layout]:
        """Return all possible layouts, as copies of data-parallel layouts with other fields.

        Args:
            wholes: Layouts in which each rank, or each CFG pair of ranks, makes whole clips.
        """
        if self.fixed is None:
            return [layout for whole in wholes for layout in _candidates(whole)]
        layouts = []
        for whole in wholes:
            with suppress(RequestError):
                layouts.append(replace(whole, **self.fixed))
        return layouts

    def _with_shared_experts(self, wholes: Sequence[Layout]) -> Iterator[Layout]:
        """Yield layouts that fit in memory, have several stages, and let a rank hold both experts.

        Experts are the two denoisers that some models have, each for a part of the steps.
        """
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
        return not _needs_more(layout, self.memory_gib)

    def _best(self, candidates: Sequence[_Candidate]) -> _Candidate:
        if self.minimize_latency:
            kept = _least(candidates, lambda each: each.seconds, 1 / _RATE_KEPT)
            candidates = _least(kept, lambda each: each.latency)
        return _least(candidates, lambda each: each.seconds)[0]

    # --- reason for the choice ------------------------------------------------------------------

    def _why(self, best: _Candidate, candidates: Sequence[_Candidate]) -> str:
        """Return a text that compares the chosen layout with the next best one."""
        rivals = [each for each in candidates if each is not best]
        if not rivals:
            return "no other layout was compared"
        clips = pluralize(self.num_clips, "clip")
        size = best.layout.cfg_parallel_size
        others = [each for each in rivals if each.layout.cfg_parallel_size != size]
        next_best = self._best(others) if others else min(rivals, key=lambda each: each.seconds)
        longer = next_best.seconds / best.seconds - 1
        if others or longer < 1 / _EQUAL - 1:
            return (
                f"{best.latency:.4g} s for a clip and {best.seconds:.4g} s for {clips}, instead of "
                f"{next_best.latency:.4g} s and {next_best.seconds:.4g} s with {next_best.layout}"
            )
        return f"the next best, {next_best.layout}, takes {max(0.0, longer):.1%} longer for {clips}"

    def _remarks(self, best: Layout, possible: Sequence[Layout], unknown: int) -> Iterator[str]:
        """Yield remarks on a choice: ranks that hold both experts, and layouts that were left out.

        `unknown` is the number of layouts that fit in memory, but whose transfer costs are unknown.
        """
        if best.expert_boundary is not None:
            num_both = sum(len(role.experts) > 1 for role in best.roles)
            yield f"both experts are on {num_both} of {pluralize(best.world_size, 'rank')}"
        layouts = pluralize(len(possible), "layout")
        if too_large := sum(not self._fits(layout) for layout in possible):
            yield f"too large for the memory: {too_large} of {layouts}"
        if unknown:
            yield (
                f"not compared: {unknown} of {layouts}, because they have transfers between hosts, "
                "and the costs lack inter_host_transfer_seconds"
            )

    def _nothing_fits(self, layouts: Sequence[Layout]) -> RequestError:
        least = min(max(peak or 0.0 for peak in layout.peak_gib) for layout in layouts)
        has = " to ".join(
            f"{each:.4g}" for each in sorted({min(self.memory_gib), max(self.memory_gib)})
        )
        return RequestError(
            f"no layout fits in the memory of the ranks ({has} GiB each): the smallest layout "
            f"needs {least:.4g} GiB",
            "use a smaller `decode_chunk_size`, or use fewer `num_frames`, or use a smaller "
            "`height` and `width`, or use `memory_opt`",
            details={
                "world_size": layouts[0].world_size,
                "requested_gib": least,
                "free_gib": min(self.memory_gib),
                "most_free_gib": max(self.memory_gib),
                "requested_bytes": round(least * 2**30),
                "free_bytes": round(min(self.memory_gib) * 2**30),
            },
        )


def _least(
    candidates: Sequence[_Candidate], key: Callable[[_Candidate], float], factor: float = _EQUAL
) -> list[_Candidate]:
    """Return the candidates whose time is at most `factor` times the shortest time.

    `key` returns the time of a candidate, such as its latency.
    """
    most = min(map(key, candidates)) * factor
    return [each for each in candidates if key(each) <= most]


def _candidates(data_parallel: Layout) -> Iterator[Layout]:
    """Yield the candidates for the best layout, the simplest first.

    Simple layouts have few ranks in a replica, one decoder, and the split `uniform`.
    """
    num_steps, num_units = data_parallel.num_steps, data_parallel.data_parallel_size
    for replica_size in divisors(num_units):
        if replica_size > min(_MAX_REPLICA_SIZE, num_steps + 2) and replica_size > 1:
            return
        needed = 1
        if data_parallel.decodes:
            needed = decoders_needed(num_steps, replica_size, data_parallel.costs)
        for num_decoders in sorted({1, needed} - ({replica_size} if replica_size > 1 else set())):
            for split in SPLITS if replica_size > 1 else SPLITS[:1]:
                # The uniform split raises an error if the stages cannot have equally many steps.
                # Such a candidate is skipped.
                with suppress(RequestError):
                    yield replace(
                        data_parallel,
                        split=split,
                        data_parallel_size=num_units // replica_size,
                        num_decoders=num_decoders,
                    )


def decoders_needed(num_steps: int, replica_size: int, costs: CostModel) -> int:
    """Return the number of ranks of a replica that must take turns in decoding, 1 or more.

    With fewer ranks, decodes would limit the throughput.

    Args:
        num_steps: Number of steps of a clip.
        replica_size: Number of ranks of a replica.
        costs: Cost model. If ranks differ in speed, the mean over all ranks is used.
    """
    encode, decode = _mean(costs.encode_seconds), _mean(costs.decode_seconds)
    share = (encode + num_steps * _mean(costs.step_seconds) + decode) / replica_size
    return max(1, math.ceil(decode / share))


def _mean(value: PerRank) -> float:
    return math.fsum(value) / len(value) if isinstance(value, tuple) else value


def _has_known_transfers(layout: Layout) -> bool:
    host, links = layout.costs.host_of, (*layout.links, *layout.decode_links)
    crosses = any(host(source) != host(target) for source, target in links)
    return not crosses or layout.costs.inter_host_transfer_seconds is not None


# --- comparison of layouts ------------------------------------------------------------------------


class LayoutForecast(NamedTuple):
    """Forecast of one layout in a comparison of layouts."""

    name: str
    layout: Layout | None = None
    """Layout that is compared; None if it is impossible."""
    forecast: Forecast | None = None
    """Forecast of the layout; None if the layout is impossible."""
    seconds_per_clip: float = 0.0
    """Mean seconds between finished clips in a long queue."""
    note: str = ""
    """Remark on the layout: why `auto` chose it, why it is impossible, or that it does not fit in
    memory. Usually empty."""


def compare_layouts(
    *,
    num_clips: int,
    memory_gib: Sequence[float] = (),
    pairs: bool = False,
    minimize_latency: bool = False,
    **counts: Any,
) -> list[LayoutForecast]:
    """Return the forecasts of the layouts that `plan --compare` shows.

    The layouts are one replica with each split, one replica with several ranks that decode, the
    layout that `auto` chooses, data parallel, and pairs of ranks if the number of ranks is even.

    Args:
        num_clips: Number of clips to forecast.
        memory_gib: Memory of each rank, in GiB. If a layout needs more, its `note` says so. Empty:
            the memory is unknown.
        pairs: Whether `auto` may choose pairs (two ranks that share each step).
        minimize_latency: Whether `auto` minimises the latency of a clip.
        counts: Other fields of all layouts, as for `choose_layout`.

    Raises:
        RequestError: The number of steps or ranks is out of range, or the costs are for another
            number of ranks.
    """
    num_steps, world_size, costs = (counts[key] for key in ("num_steps", "world_size", "costs"))
    check_counts(num_steps, world_size)
    costs.check_world(world_size)
    decoders = min(world_size, max(2, decoders_needed(num_steps, world_size, costs)))
    named: dict[str, dict[str, Any] | None] = {
        **{split: {"split": split} for split in SPLITS},
        f"{decoders} decoders": {"split": "alternating", "num_decoders": decoders},
        "auto": None,
        "data parallel": {"data_parallel_size": world_size},
    }
    if world_size % 2 == 0:
        named["pairs"] = {"data_parallel_size": world_size // 2, "cfg_parallel_size": 2}
    rows = []
    for name, options in named.items():
        try:
            if options is None:
                limits: dict[str, Any] = {"memory_gib": memory_gib, "pairs": pairs}
                choice = choose_layout(
                    num_clips=num_clips, minimize_latency=minimize_latency, **limits, **counts
                )
                layout, note = choice.layout, choice.reason
            else:
                layout = Layout(**counts, **options)
                note = _needs_more(layout, memory_gib)
            forecast = forecast_layout(layout, num_clips)
            rows.append(
                LayoutForecast(name, layout, forecast, steady_seconds_per_clip(layout), note)
            )
        except RequestError as error:
            rows.append(LayoutForecast(name, note=error.message))
    return rows


def _needs_more(layout: Layout, memory_gib: Sequence[float]) -> str:
    for rank, (has, needs) in enumerate(zip(memory_gib, layout.peak_gib, strict=False)):
        if needs is not None and needs > has:
            return f"rank {rank} needs {needs:.4g} GiB and has {has:.4g}"
    return ""
