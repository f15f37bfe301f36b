"""Hypothesis strategies for layouts and costs, and checks of schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean
from typing import Any

from hypothesis import strategies as st

from svdpp.plan.actions import SENDS, Action, DecodeRange, Kind, Schedule
from svdpp.plan.costs import CostModel
from svdpp.plan.layout import Layout
from svdpp.plan.parallel import SPLITS
from svdpp.plan.split import StageGroup

# Durations are multiples of a power of two. Their sums are exact in any order, so tests can compare
# times with ==.
seconds = st.integers(0, 64).map(lambda quarters: quarters / 4)
costs = st.builds(
    CostModel,
    step_seconds=st.integers(1, 32).map(lambda quarters: quarters / 4),
    encode_seconds=seconds,
    decode_seconds=seconds,
    transfer_seconds=seconds,
)


def memory(weights: tuple[float, float, float], work: tuple[float, float, float]) -> dict[str, Any]:
    """Return the memory fields of a `CostModel`, from the GiB of encode, denoise and decode."""
    parts = ("encode", "denoise", "decode")
    return {
        f"{part}_{kind}_gib": size
        for kind, sizes in (("weights", weights), ("work", work))
        for part, size in zip(parts, sizes, strict=True)
    }


#: Approximate fields of a `CostModel` for Wan 2.2 A14B in 40 steps.
WAN: dict[str, Any] = {
    "num_steps": 40,
    "expert_boundary": 13,
    "costs": CostModel(
        step_seconds=4, encode_seconds=2, decode_seconds=10, **memory((11, 27, 0.5), (1, 9, 6))
    ),
}


@st.composite
def layouts(draw: st.DrawFn, *, pairs: bool = False) -> Layout:
    """Strategy of Hypothesis for valid layouts on some hosts, with CFG pairs only if `pairs`."""
    replicas, replica_size = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    cfg_parallel = draw(st.integers(1, 1 + pairs))
    world_size = replicas * replica_size * cfg_parallel
    has_two = draw(st.booleans())
    share = draw(st.booleans())
    apart = has_two and not share and replica_size > 1
    decoders = draw(st.integers(1, replica_size - apart))
    num_stages = replica_size - decoders + 1
    split = draw(st.sampled_from(SPLITS))
    boundary = None
    if apart and split == "uniform":
        first = draw(st.integers(1, num_stages - 1))
        boundary = first * draw(st.integers(1, 4))
        num_steps = boundary + (num_stages - first) * draw(st.integers(1, 4))
    elif split == "uniform":
        num_steps = num_stages * draw(st.integers(1 + has_two, 4))
    else:
        num_steps = draw(st.integers(1 + has_two, 12))
    if has_two and boundary is None:
        boundary = draw(st.integers(1, num_steps - 1))
    return Layout(
        num_steps=num_steps,
        world_size=world_size,
        split=split,
        data_parallel_size=replicas,
        num_decoders=decoders,
        costs=draw(_costs_of(world_size, cfg_parallel)),
        decodes=draw(st.booleans()),
        expert_boundary=boundary,
        share_experts=share,
        cfg_parallel_size=cfg_parallel,
        decode_parallel_size=draw(
            st.integers(1, cfg_parallel * (replica_size if decoders == 1 else 1))
        ),
        chunks=draw(st.sampled_from([(8,), (8, 8), (8, 4, 4), (4,) * 4, (2,) * 8])),
    )


@st.composite
def _costs_of(draw: st.DrawFn, world_size: int, cfg_parallel: int) -> CostModel:
    """Strategy of Hypothesis for costs of equally fast or different ranks, on some hosts."""
    given = draw(costs)
    if draw(st.booleans()):
        steps = st.lists(st.integers(1, 8).map(lambda n: n / 2), min_size=world_size)
        given = replace(given, step_seconds=tuple(draw(steps)[:world_size]))
    units = world_size // cfg_parallel
    per_host = draw(st.sampled_from([n for n in range(1, units + 1) if units % n == 0]))
    return replace(given, ranks_per_host=cfg_parallel * per_host, inter_host_transfer_seconds=5.0)


def steps_in(seconds: float, part: StageGroup) -> float:
    """Return how many steps of every clip the stages can do in `seconds`. Fractions count."""
    return sum(fmean(stage.steps_within(seconds, part.num_steps)) for stage in part.stages)


# --- check of a schedule --------------------------------------------------------------------------

_BEGINNINGS = (Kind.ENCODE, Kind.LOAD_CHECKPOINT)


def check_schedule(schedule: Schedule, num_steps: int) -> None:
    """Check that ranks start each clip once, do each of its steps in order, and finish it once.

    A clip is started by ENCODE at step 0, or by LOAD_CHECKPOINT at the step that an earlier run
    reached. A rank can work only on a clip that it holds, and only at that clip's current step. It
    no longer holds a clip that it has sent, and each sent packet is received once. So no step is
    skipped or repeated. Both ranks of a CFG pair do the same steps. Each frame is decoded once.
    """
    transfers: Counter[tuple[Any, ...]] = Counter()
    halves: Counter[tuple[int, ...]] = Counter()
    started: list[int] = []
    finished: list[int] = []
    decodes: dict[int, list[DecodeRange]] = {}
    for rank, rank_actions in enumerate(schedule):
        held: dict[int, int] = {}
        decoded: set[int] = set()
        for action in rank_actions:
            can_follow = _can_follow(action, held, decoded, num_steps)
            assert can_follow, f"clip {action.clip}: rank {rank} cannot do {action}"
            packet = action.clip, action.start, action.part
            if action.kind in (Kind.RECV, Kind.RECV_FRAMES):
                transfers[action.peer, rank, packet] -= 1
            elif action.kind in SENDS:
                transfers[rank, action.peer, packet] += 1
            elif action.kind is Kind.DECODE:
                decodes.setdefault(action.clip, []).append(action.part or DecodeRange(0, 1, 1))
            elif action.kind is Kind.DENOISE:
                pair = max(rank, action.peer) if action.peer >= 0 else -1
                halves[pair, *action[1:4]] += 1 if pair >= 0 else 2
            elif action.kind in _BEGINNINGS:
                started.append(action.clip)
            elif action.kind is Kind.FINISH:
                finished.append(action.clip)
        assert not held, f"rank {rank} ends with unfinished clips: {held}"
    assert not any(transfers.values()), "a transfer has one end"
    assert set(halves.values()) <= {2}, "a clip's steps are not done once, or by both of a pair"
    assert all(map(_is_whole, decodes.values())), "a clip's frames are not decoded once"
    assert sorted(started) == sorted(finished), "a clip is started or finished alone"
    assert len(started) == len(set(started)), "a clip is started twice"


def check_receives(schedule: Schedule) -> None:
    """Check that no rank of a schedule posts receives for more than one clip in advance."""
    for rank_actions in schedule:
        posted: set[int] = set()
        for action in rank_actions:
            if action.kind is Kind.RECV:
                posted.add(action.clip)
            else:
                posted.discard(action.clip)
                assert len(posted) <= 1


def _can_follow(action: Action, held: dict[int, int], decoded: set[int], num_steps: int) -> bool:
    """Apply an action of a schedule to a rank's state; return whether the action was possible.

    `held` has the number of finished steps of each clip that the rank holds.
    """
    clip = action.clip
    if action.kind in (*_BEGINNINGS, Kind.RECV):
        fresh = clip not in held and (action.kind is not Kind.ENCODE or action.start == 0)
        held[clip] = action.start
        return fresh
    if held.get(clip) != action.start:
        return False
    if action.kind is Kind.DENOISE:
        held[clip] = action.end
        return action.start < action.end <= num_steps
    if action.kind is Kind.DECODE:
        first = clip not in decoded
        decoded.add(clip)
        return first and action.start == num_steps
    if action.kind is Kind.SHARE:
        return True
    if action.kind is Kind.RECV_FRAMES:
        return clip in decoded
    if action.kind is Kind.SEND_FRAMES and clip not in decoded:
        return False
    del held[clip]
    return action.kind is Kind.SEND or action.start == num_steps


def _is_whole(parts: Iterable[DecodeRange]) -> bool:
    firsts, ends, totals = zip(*sorted(parts), strict=True)
    return (*firsts, totals[0]) == (0, *ends) and len(set(totals)) == 1
