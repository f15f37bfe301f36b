"""The costs file of a bench: the costs for a plan, from the measured rounds."""

from __future__ import annotations

from collections import defaultdict

from svdpp.bench.names import DATA_PARALLEL, PIPELINE
from svdpp.bench.runner import Bench
from svdpp.diagnostics.cost_profile import Profile, median
from svdpp.driver.trace import Trace, TransferSpan
from svdpp.plan.costs import Costs


def costs_of(bench: Bench, run_id: str) -> Costs:
    """The medians of all rounds of the pipeline. A bench does not measure memory and writing."""
    traces = [each.trace for each in bench.rounds if each.case == PIPELINE]
    others = [each.trace for each in bench.rounds if each.case == DATA_PARALLEL]
    packets = [transfer for trace in traces for transfer in _packets(trace)]
    steps = _steps(traces, others, bench.config.world_size)
    profile = Profile(bench.config, bench.world, step_seconds=steps)
    profile.set_actions(span for trace in traces for span in trace.spans)
    profile.set_packets(packets)
    return profile.costs(f"svdpp bench, {bench.asked.experiment}/{run_id}")


def _steps(traces: list[Trace], others: list[Trace], world_size: int) -> list[float]:
    """The median step of each rank, by rank.

    A rank that only decodes in the pipeline has its steps from data parallel. If that did not fit
    in memory, the rank counts as fast as the others.
    """
    found, elsewhere = _steps_by_rank(traces), _steps_by_rank(others)
    own = {
        rank: median(found.get(rank) or elsewhere[rank])
        for rank in range(world_size)
        if rank in found or rank in elsewhere
    }
    return [own.get(rank, median(list(own.values()))) for rank in range(world_size)]


def _steps_by_rank(traces: list[Trace]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for trace in traces:
        for step in trace.steps:
            found[step.rank].append(step.end - step.start)
    return dict(found)


def _packets(trace: Trace) -> list[TransferSpan]:
    """Transfers, measured at their receivers."""
    return [transfer for transfer in trace.transfers if transfer.direction == "recv"]
