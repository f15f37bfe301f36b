"""Owns the draft's wave: where each rank starts in a clip's steps, whom it tells what, and when.

The method is CHORDS (arXiv:2507.15260), for SVD's Euler sampler. Rank 0 walks the exact path. Each
other rank starts further on, from where one long step of the rank before it lands, and mends its
path whenever that rank comes by the step at which it last began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import NamedTuple

from svdpp.errors import RequestError
from svdpp.plan import actions
from svdpp.plan.actions import Action, Kind
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import replay
from svdpp.plan.layout import Roles, Share
from svdpp.plan.schedule import Schedule


class Meeting(NamedTuple):
    """A rank hears what the one before it found at step `begun`, and mends its latent at `at`."""

    begun: int
    at: int


@dataclass(frozen=True, kw_only=True)
class Wave:
    """W ranks that walk all steps of the same clip, each from its own start.

    Rank k does its first step in round k, and one step in each round. It is done after
    k + N - starts[k] rounds: the last rank first, rank 0 after N rounds as ever.

    Raises:
        RequestError: starts that do not rise from 0, or do not stay below the number of steps.
    """

    num_steps: int
    """Denoising steps N of each clip."""
    starts: tuple[int, ...]
    """The step at which each rank starts, by rank."""
    decodes: bool = True
    """Whether results become frames."""

    def __post_init__(self) -> None:
        starts, given = self.starts, ",".join(map(str, self.starts))
        if len(starts) < 2:
            raise RequestError(
                f"a draft needs 2 ranks or more, got {len(starts)}", "use --world 2 or more"
            )
        rises = all(before < after for before, after in pairwise(starts))
        if starts[0] != 0 or not rises:
            raise RequestError(f"--starts must rise from 0, got {given}", "such as --starts 0,14")
        if starts[-1] >= self.num_steps:
            raise RequestError(
                f"--starts must be below the {self.num_steps} steps of a clip, got {given}"
            )

    def __str__(self) -> str:
        return f"draft, starts {' '.join(map(str, self.starts))}"

    @property
    def world_size(self) -> int:
        """Number of ranks W."""
        return len(self.starts)

    @property
    def hops(self) -> tuple[tuple[int, int], ...]:
        """All (from, to) that talk: neighbours, and each rank with the last, which has results."""
        last = self.world_size - 1
        neighbours = {(rank, rank + 1) for rank in range(last)}
        return tuple(sorted(neighbours | {(rank, last) for rank in range(last)}))

    @property
    def roles(self) -> tuple[Roles, ...]:
        """Rank 0 encodes; each rank decodes its own result, on a device that has nothing to do."""
        return tuple(
            Roles(encode=rank == 0, denoise=True, decode=self.decodes)
            for rank in range(self.world_size)
        )

    @property
    def all_shares(self) -> tuple[Share, ...]:
        """What each rank does of every clip, by rank."""
        return tuple(
            Share(rank=rank, start=start, end=self.num_steps, mean_steps=self.num_steps - start)
            for rank, start in enumerate(self.starts)
        )

    def rounds(self, rank: int) -> int:
        """Rounds until `rank` has its result, in units of one step."""
        return rank + self.num_steps - self.starts[rank]

    @property
    def num_evaluations(self) -> int:
        """Steps that all ranks do for one clip."""
        return sum(self.num_steps - start for start in self.starts)

    @cached_property
    def num_messages(self) -> int:
        """Packets that all ranks send for one clip."""
        sends = Kind.LEAP, Kind.TELL
        return sum(action.kind in sends for each in self.schedule([0]) for action in each)

    def meetings(self, rank: int) -> tuple[Meeting, ...]:
        """When `rank` hears from the one before it, and of which step.

        Rank k - 1 does step s in round s - starts[k - 1] + k - 1. When it comes by the step at
        which rank k last began, rank k is as many steps further as the starts lie apart.
        """
        if rank == 0:
            return ()
        apart = self.starts[rank] - self.starts[rank - 1]
        places = range(self.starts[rank] + apart, self.num_steps + 1, apart)
        return tuple(Meeting(at - apart, at) for at in places)

    def schedule(self, clips: Iterable[int]) -> Schedule:
        """Each rank's list, for clips that come one after the other."""
        clips = list(clips)
        return tuple(
            tuple(action for clip in clips for action in self._all_of(rank, clip))
            for rank in range(self.world_size)
        )

    def ready_at(self, costs: Costs) -> list[float]:
        """Seconds until each rank has its result, decoded; rank 0's is the exact clip."""
        spans = replay(self.schedule([0]), costs)
        return [
            max(span.end for span in spans if span.rank == rank) for rank in range(self.world_size)
        ]

    def peak_gib(self, costs: Costs) -> tuple[float | None, ...]:
        """Peak memory of each rank; None where the costs do not say."""
        return tuple(
            costs.peak_gib(encode=role.encode, denoise=role.denoise, decode=role.decode)
            for role in self.roles
        )

    def _all_of(self, rank: int, clip: int) -> Iterator[Action]:
        """What `rank` does of `clip`, in order."""
        last = self.world_size - 1
        if rank == 0:
            yield actions.encode(clip)
        else:
            yield actions.recv(clip, self.starts[rank], rank - 1)
        yield from self._steps(rank, clip)
        if self.decodes:
            yield actions.decode(clip, self.num_steps)
        if rank < last:
            yield actions.tell(clip, self.num_steps, last)
        else:
            yield actions.deliver(clip, self.num_steps)
            yield from self._reviews(clip)

    def _steps(self, rank: int, clip: int) -> Iterator[Action]:
        """The steps, cut where there is something to tell, or to mend by what is heard.

        What is heard is posted before the steps at whose end it is needed, so that the hop runs
        beneath them.
        """
        begun_of = {meeting.at: meeting.begun for meeting in self.meetings(rank)}
        told = {meeting.begun for meeting in self.meetings(rank + 1)} if self._tells(rank) else ()
        hears = iter([actions.hear(clip, each.begun, rank - 1) for each in self.meetings(rank)])
        yield from islice(hears, 1)
        done = self.starts[rank]
        for step in range(self.starts[rank], self.num_steps):
            after: list[Action] = []
            if step == self.starts[rank] and self._tells(rank):
                after.append(actions.leap(clip, step, self.starts[rank + 1], rank + 1))
            if step in told:
                after.append(actions.tell(clip, step, rank + 1))
            if step + 1 in begun_of:
                after.append(actions.correct(clip, begun_of[step + 1], step + 1, rank - 1))
                after += islice(hears, 1)
            if after or step + 1 == self.num_steps:
                yield actions.denoise(clip, done, step + 1)
                yield from after
                done = step + 1

    def _tells(self, rank: int) -> bool:
        return rank + 1 < self.world_size

    def _reviews(self, clip: int) -> Iterator[Action]:
        """The last rank's view of the other results, which come one link each."""
        others = range(self.world_size - 2, -1, -1)
        yield from (actions.hear(clip, self.num_steps, rank) for rank in others)
        yield from (actions.review(clip, self.num_steps, rank) for rank in others)


def check_wave(schedule: Schedule, num_steps: int) -> None:
    """Proves that every walk does its steps in order to the last, and that no word is lost.

    Raises:
        ValueError: naming the first action that cannot be done, or what is missing at the end.
    """
    messages: Counter[tuple[int, int, int, int]] = Counter()
    exact: Counter[int] = Counter()
    for rank, rank_actions in enumerate(schedule):
        walks: dict[int, _WalkCheck] = {}
        for action in rank_actions:
            walk = walks.setdefault(action.clip, _WalkCheck(num_steps))
            if not walk.can_do(action):
                raise ValueError(f"rank {rank} cannot do {action} of {num_steps} with {walk}")
            if action.kind in (Kind.LEAP, Kind.TELL):
                messages[rank, action.peer, action.clip, action.end] += 1
            elif action.kind in (Kind.RECV, Kind.HEAR):
                messages[action.peer, rank, action.clip, action.start] -= 1
            elif action.kind is Kind.ENCODE:
                exact[action.clip] += 1
        if unfinished := [f"clip {clip}: {w}" for clip, w in walks.items() if not w.is_over]:
            raise ValueError(f"rank {rank} is left with {unfinished[0]}")
        if missing := sorted(clip for clip in walks if exact[clip] != 1):
            raise ValueError(f"clip {missing[0]} is not begun by one rank, the first")
    if odd := sorted(hop for hop, count in messages.items() if count):
        raise ValueError(f"words (from, to, clip, step) without their other end: {odd[:3]}")


@dataclass
class _WalkCheck:
    """What one rank knows of one clip, as far as the order of its actions goes."""

    num_steps: int
    at: int = -1
    began: int = -1
    heard: tuple[tuple[int, int], ...] = ()

    @property
    def is_over(self) -> bool:
        return self.at == self.num_steps and not self.heard

    def can_do(self, action: Action) -> bool:
        """Does `action`; whether it could be done."""
        match action.kind:
            case Kind.ENCODE | Kind.RECV:
                fresh, self.at, self.began = self.at < 0, action.start, action.start
                return fresh
            case Kind.DENOISE:
                follows, self.at = self.at == action.start < action.end, action.end
                return follows and action.end <= self.num_steps
            case Kind.LEAP:
                return self.at == action.start + 1 and action.end > action.start
            case Kind.TELL:
                return self.at == min(action.start + 1, self.num_steps)
            case Kind.HEAR:
                self.heard += ((action.peer, action.start),)
                return True
            case Kind.CORRECT:
                mends = (self.began, self.at) == (action.start, action.end)
                self.began = action.end
                return mends and self._takes(action)
            case Kind.REVIEW:
                return self.at == self.num_steps and self._takes(action)
            case Kind.DECODE | Kind.DELIVER:
                return self.at == self.num_steps
            case _:
                return False

    def _takes(self, action: Action) -> bool:
        word = action.peer, action.start
        known = word in self.heard
        self.heard = tuple(each for each in self.heard if each != word)
        return known
