"""The check that a schedule makes each clip once, as it should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

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
    transfers: Counter[tuple[int, int, int, int, tuple[int, ...]]] = Counter()
    started: Counter[int] = Counter()
    finished: Counter[int] = Counter()
    halves: Counter[tuple[int, int, int, int]] = Counter()
    decodes: dict[int, list[FrameRange]] = {}
    for rank, rank_actions in enumerate(schedule):
        held: dict[int, int] = {}
        decoded: set[int] = set()
        for action in rank_actions:
            before = _clips(held)
            steps = num_steps if isinstance(num_steps, int) else num_steps[action.clip]
            if not _can_follow(action, held, decoded, steps):
                raise ValueError(f"rank {rank} cannot do {action} of {steps} with {before}")
            packet = action.clip, action.start, action.frames or ()
            if action.kind in (Kind.RECV, Kind.GATHER):
                transfers[action.peer, rank, *packet] -= 1
            elif action.kind in SENDS:
                transfers[rank, action.peer, *packet] += 1
            elif action.kind is Kind.DECODE:
                decodes.setdefault(action.clip, []).append(action.frames or FrameRange(0, 1, 1))
            elif action.kind is Kind.DENOISE:
                pair = max(rank, action.peer) if action.peer >= 0 else -1
                halves[pair, *action[1:4]] += 1 if pair >= 0 else 2
            elif action.kind in _BEGINNINGS:
                started[action.clip] += 1
            elif action.kind is Kind.FINISH:
                finished[action.clip] += 1
        if held:
            raise ValueError(f"rank {rank} ends with unfinished clips: {_clips(held)}")
    odd = sorted(transfer[:4] for transfer, count in transfers.items() if count)
    if odd:
        raise ValueError(f"unmatched transfers (from, to, clip, step): {odd[:3]}")
    if halved := sorted(half for half, count in halves.items() if count != 2):
        raise ValueError(f"not done once, or by both of a pair (rank, clip, steps): {halved[:3]}")
    if wrong := sorted(clip for clip, parts in decodes.items() if not _is_whole(parts)):
        raise ValueError(f"frames not decoded once: clips {wrong[:3]}")
    for what, clips in (("started", started), ("finished", finished)):
        if wrong := sorted(clip for clip, count in clips.items() if count != 1):
            raise ValueError(f"{what} more than once: clips {wrong[:3]}")
    if different := sorted(started.keys() ^ finished.keys()):
        raise ValueError(f"started but not finished, or not started: clips {different[:3]}")


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


def _clips(held: dict[int, int]) -> str:
    return ", ".join(f"clip {clip} at step {at}" for clip, at in held.items()) or "no clip"
