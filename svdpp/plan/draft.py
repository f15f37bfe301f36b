"""The draft plan: the start step of each rank, and which states it exchanges at which steps.

The method is CHORDS (arXiv:2507.15260) for SVD's Euler sampler. Rank 0 computes the exact clip.
Every other rank starts at a later step, from a long Euler step of the rank before it. It corrects
its latent each time that rank reaches the step of the latest correction, at first the start step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import NamedTuple

from svdpp.errors import RequestError
from svdpp.plan.actions import RECEIVES, SENDS, Action, Kind
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import replay
from svdpp.plan.layout import Roles, StepShare
from svdpp.plan.schedule import Schedule


class Correction(NamedTuple):
    """A rank corrects its latent at step `at` with the state of the rank before at step `begun`."""

    begun: int
    at: int


@dataclass(frozen=True, kw_only=True)
class DraftPlan:
    """W ranks that denoise the same clip, each from its own start step.

    In each round a rank does one step. Rank k does its first step in round k and finishes after
    k + N - start_steps[k] rounds: the last rank finishes first, rank 0 after N rounds.

    Raises:
        RequestError: start steps that do not increase from 0, or are not below the number of steps.
    """

    num_steps: int
    """Denoising steps N of each clip."""
    start_steps: tuple[int, ...]
    """The step at which each rank starts, by rank."""
    decodes: bool = True
    """Whether results are decoded to frames."""

    def __post_init__(self) -> None:
        start_steps, given = self.start_steps, ",".join(map(str, self.start_steps))
        if len(start_steps) < 2:
            raise RequestError(
                f"a draft needs 2 ranks or more, got {len(start_steps)}", "use --world 2 or more"
            )
        rises = all(before < after for before, after in pairwise(start_steps))
        if start_steps[0] != 0 or not rises:
            raise RequestError(
                f"--draft-starts must rise from 0, got {given}", "such as --draft-starts 0,14"
            )
        if start_steps[-1] >= self.num_steps:
            raise RequestError(
                f"--draft-starts must be below the {self.num_steps} steps of a clip, got {given}"
            )

    def __str__(self) -> str:
        return f"draft, start steps {' '.join(map(str, self.start_steps))}"

    @property
    def world_size(self) -> int:
        """Number of ranks W."""
        return len(self.start_steps)

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """All pairs (from, to) that communicate: neighbours, and each rank with the last one."""
        last = self.world_size - 1
        neighbours = {(rank, rank + 1) for rank in range(last)}
        return tuple(sorted(neighbours | {(rank, last) for rank in range(last)}))

    @property
    def roles(self) -> tuple[Roles, ...]:
        """The parts of the model that each rank uses: rank 0 encodes, every rank decodes."""
        return tuple(
            Roles(encode=rank == 0, denoise=True, decode=self.decodes)
            for rank in range(self.world_size)
        )

    @property
    def all_shares(self) -> tuple[StepShare, ...]:
        """The steps that each rank does of every clip, by rank."""
        return tuple(
            StepShare(rank=rank, start=start, end=self.num_steps, mean_steps=self.num_steps - start)
            for rank, start in enumerate(self.start_steps)
        )

    def rounds(self, rank: int) -> int:
        """Rounds until `rank` finishes its steps; a round takes as long as one step."""
        return rank + self.num_steps - self.start_steps[rank]

    @property
    def num_evaluations(self) -> int:
        """Steps that all ranks do for one clip."""
        return sum(self.num_steps - start for start in self.start_steps)

    @cached_property
    def num_messages(self) -> int:
        """Packets that all ranks send for one clip."""
        return sum(action.kind in SENDS for each in self.schedule([0]) for action in each)

    def corrections(self, rank: int) -> tuple[Correction, ...]:
        """The corrections of `rank`, in order.

        Rank k - 1 does step s in round s - start_steps[k - 1] + k - 1. When it reaches the start
        step or last correction of rank k, rank k is ahead by the distance between their start
        steps.
        """
        if rank == 0:
            return ()
        distance = self.start_steps[rank] - self.start_steps[rank - 1]
        places = range(self.start_steps[rank] + distance, self.num_steps + 1, distance)
        return tuple(Correction(at - distance, at) for at in places)

    def schedule(self, clips: Iterable[int]) -> Schedule:
        """The action list of each rank, for clips one after the other."""
        clips = list(clips)
        return tuple(
            tuple(action for clip in clips for action in self._clip_actions(rank, clip))
            for rank in range(self.world_size)
        )

    def ready_at(self, costs: Costs) -> list[float]:
        """Seconds until each rank has its decoded result; that of rank 0 is the exact clip."""
        spans = replay(self.schedule([0]), costs)
        return [
            max(span.end for span in spans if span.rank == rank) for rank in range(self.world_size)
        ]

    def peak_gib(self, costs: Costs) -> tuple[float | None, ...]:
        """Peak memory of each rank, GiB; None if the costs do not give it."""
        return tuple(costs.peak_gib(**role.parts) for role in self.roles)

    def _clip_actions(self, rank: int, clip: int) -> Iterator[Action]:
        """The actions of `rank` for `clip`, in order."""
        last = self.world_size - 1
        if rank == 0:
            yield Action.at(Kind.ENCODE, clip, 0)
        else:
            yield Action.at(Kind.RECV, clip, self.start_steps[rank], rank - 1)
        yield from self._denoise_actions(rank, clip)
        if self.decodes:
            yield Action.at(Kind.DECODE, clip, self.num_steps)
        if rank < last:
            yield Action.at(Kind.SEND_RESULT, clip, self.num_steps, last)
        else:
            yield Action.at(Kind.FINISH, clip, self.num_steps)
            yield from self._compare_actions(clip)

    def _denoise_actions(self, rank: int, clip: int) -> Iterator[Action]:
        """The steps, cut where a state is sent or the latent is corrected.

        The receive of a state is posted before the steps that precede its use, so that the transfer
        overlaps with them.
        """
        start = self.start_steps[rank]
        begun_of = {each.at: each.begun for each in self.corrections(rank)}
        is_last = rank + 1 == self.world_size
        sent = () if is_last else {each.begun for each in self.corrections(rank + 1)}
        receives = iter(
            [
                Action.at(Kind.RECV_STATE, clip, each.begun, rank - 1)
                for each in self.corrections(rank)
            ]
        )
        yield from islice(receives, 1)
        done = start
        for step in range(start, self.num_steps):
            after: list[Action] = []
            if step == start and not is_last:
                after.append(
                    Action(Kind.SEND_START, clip, step, self.start_steps[rank + 1], rank + 1)
                )
            if step in sent:
                after.append(Action.at(Kind.SEND_STATE, clip, step, rank + 1))
            if step + 1 in begun_of:
                after.append(Action(Kind.CORRECT, clip, begun_of[step + 1], step + 1, rank - 1))
                after += islice(receives, 1)
            if after or step + 1 == self.num_steps:
                yield Action(Kind.DENOISE, clip, done, step + 1)
                yield from after
                done = step + 1

    def _compare_actions(self, clip: int) -> Iterator[Action]:
        """The comparisons of the last rank; each other rank has its own link to it."""
        others = range(self.world_size - 2, -1, -1)
        yield from (Action.at(Kind.RECV_RESULT, clip, self.num_steps, rank) for rank in others)
        yield from (Action.at(Kind.COMPARE, clip, self.num_steps, rank) for rank in others)


def check_draft_schedule(schedule: Schedule, num_steps: int) -> None:
    """Check that every rank does its steps in order to the last, and each send has one receive.

    Raises:
        ValueError: it names the first action that cannot be done, or what is missing at the end.
    """
    transfers: Counter[tuple[int, int, int, int]] = Counter()
    encoded: Counter[int] = Counter()
    for rank, rank_actions in enumerate(schedule):
        states: dict[int, _ClipState] = {}
        for action in rank_actions:
            state = states.setdefault(action.clip, _ClipState(num_steps))
            if not state.can_do(action):
                raise ValueError(f"rank {rank} cannot do {action} of {num_steps} with {state}")
            if action.kind in SENDS:
                transfers[rank, action.peer, action.clip, action.end] += 1
            elif action.kind in RECEIVES:
                transfers[action.peer, rank, action.clip, action.start] -= 1
            elif action.kind is Kind.ENCODE:
                encoded[action.clip] += 1
        if unfinished := [f"clip {clip}: {s}" for clip, s in states.items() if not s.is_over]:
            raise ValueError(f"rank {rank} ends with an unfinished clip: {unfinished[0]}")
        if missing := sorted(clip for clip in states if encoded[clip] != 1):
            raise ValueError(f"clip {missing[0]} is not encoded once, by rank 0")
    if odd := sorted(transfer for transfer, count in transfers.items() if count):
        raise ValueError(f"unmatched transfers (from, to, clip, step): {odd[:3]}")


@dataclass
class _ClipState:
    """The state of one clip at one rank, for `check_draft_schedule`."""

    num_steps: int
    at: int = -1
    began: int = -1
    posted: tuple[tuple[int, int], ...] = ()
    """Peer and step of each posted receive whose data is not used yet."""

    @property
    def is_over(self) -> bool:
        return self.at == self.num_steps and not self.posted

    def can_do(self, action: Action) -> bool:
        """Apply `action`; return whether it was possible."""
        match action.kind:
            case Kind.ENCODE | Kind.RECV:
                fresh, self.at, self.began = self.at < 0, action.start, action.start
                return fresh
            case Kind.DENOISE:
                follows, self.at = self.at == action.start < action.end, action.end
                return follows and action.end <= self.num_steps
            case Kind.SEND_START:
                return self.at == action.start + 1 and action.end > action.start
            case Kind.SEND_STATE:
                return self.at == action.start + 1
            case Kind.RECV_STATE | Kind.RECV_RESULT:
                self.posted += ((action.peer, action.start),)
                return True
            case Kind.CORRECT:
                fits = (self.began, self.at) == (action.start, action.end)
                self.began = action.end
                return fits and self._uses_posted(action)
            case Kind.COMPARE:
                return self.at == self.num_steps and self._uses_posted(action)
            case Kind.DECODE | Kind.FINISH | Kind.SEND_RESULT:
                return self.at == self.num_steps == action.start
            case _:
                return False

    def _uses_posted(self, action: Action) -> bool:
        used = action.peer, action.start
        is_posted = used in self.posted
        self.posted = tuple(each for each in self.posted if each != used)
        return is_posted
