"""The check that a schedule makes each clip once, as it should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from svdpp.plan.actions import SENDS, Action, FrameRange, Kind
from svdpp.plan.schedule import Schedule

_BEGINNINGS = (Kind.ENCODE, Kind.LOAD)


def check_schedule(schedule: Schedule, num_steps: int | Mapping[int, int]) -> None:
    """Check that every clip is started once, does each step once in order, and is finished once.

    A clip is started by ENCODE at step 0, or by LOAD at the step that an earlier run reached. A
    rank can work only on a clip that it holds, and only at the current step of that clip. It no
    longer holds a clip that it has sent, and each sent packet is received once. So no step is
    skipped or repeated. Both ranks of a pair do the same steps. Each frame is decoded once.
    """
    transfers: Counter[tuple[Any, ...]] = Counter()
    halves: Counter[tuple[int, ...]] = Counter()
    started: list[int] = []
    finished: list[int] = []
    decodes: dict[int, list[FrameRange]] = {}
    for rank, rank_actions in enumerate(schedule):
        held: dict[int, int] = {}
        decoded: set[int] = set()
        for action in rank_actions:
            steps = num_steps if isinstance(num_steps, int) else num_steps[action.clip]
            fits = _can_follow(action, held, decoded, steps)
            require(fits, f"clip {action.clip}: rank {rank} cannot do {action}")
            packet = action.clip, action.start, action.frames
            if action.kind in (Kind.RECV, Kind.GATHER):
                transfers[action.peer, rank, packet] -= 1
            elif action.kind in SENDS:
                transfers[rank, action.peer, packet] += 1
            elif action.kind is Kind.DECODE:
                decodes.setdefault(action.clip, []).append(action.frames or FrameRange(0, 1, 1))
            elif action.kind is Kind.DENOISE:
                pair = max(rank, action.peer) if action.peer >= 0 else -1
                halves[pair, *action[1:4]] += 1 if pair >= 0 else 2
            elif action.kind in _BEGINNINGS:
                started.append(action.clip)
            elif action.kind is Kind.FINISH:
                finished.append(action.clip)
        require(not held, f"rank {rank} ends with unfinished clips: {held}")
    require(not any(transfers.values()), "a transfer has one end")
    require(set(halves.values()) <= {2}, "a clip's steps are not done once, or by both of a pair")
    require(all(map(_is_whole, decodes.values())), "a clip's frames are not decoded once")
    require(sorted(started) == sorted(finished), "a clip is started or finished alone")
    require(len(started) == len(set(started)), "a clip is started twice")


def check_receives(schedule: Schedule) -> None:
    """Check that no rank posts the receive of more than one clip ahead."""
    for rank_actions in schedule:
        posted: set[int] = set()
        for action in rank_actions:
            if action.kind is Kind.RECV:
                posted.add(action.clip)
            else:
                posted.discard(action.clip)
                assert len(posted) <= 1


def require(holds: bool, why: str) -> None:
    if not holds:
        raise ValueError(why)


def _can_follow(action: Action, held: dict[int, int], decoded: set[int], num_steps: int) -> bool:
    """Apply `action` to `held` (clip -> steps done); return whether it was possible."""
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
    if action.kind in (Kind.GATHER, Kind.RETURN) and clip not in decoded:
        return False
    if action.kind is Kind.GATHER:
        return True
    del held[clip]
    return action.kind is Kind.SEND or action.start == num_steps


def _is_whole(parts: Iterable[FrameRange]) -> bool:
    firsts, ends, totals = zip(*sorted(parts), strict=True)
    return (*firsts, totals[0]) == (0, *ends) and len(set(totals)) == 1
