"""Owns the default start steps of a draft, and the file of measured ones."""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from svdpp.errors import InputError, RequestError
from svdpp.plan.small_file import is_version, read_small_file

SCHEMA_VERSION = 1

#: The most ranks, and the fewest steps, with default start steps.
MOST_RANKS = 8
LEAST_STEPS = 4

# Steps between the starts of neighbours, from rank 1 on, for 3, 4 ... 8 ranks and drafts that take
# half the rounds: for each number of steps the gap whose draft was nearest to the exact clip on the
# demo model (64 x 64, 4 frames, one photograph; docs/draft.md). 39, 41 to 44, 46, 47 and 49 steps
# have the gaps of a neighbour.
_GAPS: Mapping[int, tuple[int, ...]] = {
    14: (3, 2, 2, 2, 1, 1),
    15: (3, 2, 2, 2, 2, 1),
    16: (3, 3, 2, 2, 2, 2),
    17: (3, 3, 2, 2, 2, 2),
    18: (4, 3, 2, 2, 2, 2),
    19: (4, 3, 3, 2, 2, 2),
    20: (4, 3, 3, 2, 2, 2),
    21: (4, 4, 3, 3, 2, 2),
    22: (5, 3, 3, 2, 2, 2),
    23: (5, 3, 3, 3, 2, 2),
    24: (5, 3, 3, 2, 2, 2),
    25: (5, 4, 3, 3, 3, 2),
    26: (6, 4, 3, 3, 2, 2),
    27: (6, 4, 3, 3, 3, 2),
    28: (6, 4, 3, 3, 3, 2),
    29: (6, 4, 3, 3, 3, 2),
    30: (7, 4, 4, 3, 3, 3),
    31: (7, 4, 4, 3, 3, 3),
    32: (7, 4, 4, 3, 3, 3),
    33: (7, 4, 4, 3, 3, 3),
    34: (8, 5, 4, 3, 3, 3),
    35: (8, 5, 4, 4, 3, 3),
    36: (8, 5, 5, 4, 3, 3),
    37: (8, 5, 5, 4, 3, 3),
    38: (8, 5, 4, 4, 3, 3),
    39: (9, 6, 4, 4, 3, 3),
    40: (9, 6, 4, 4, 3, 3),
    41: (9, 6, 4, 4, 3, 3),
    42: (9, 6, 4, 4, 3, 3),
    43: (10, 6, 6, 4, 4, 4),
    44: (10, 6, 6, 4, 4, 4),
    45: (10, 6, 6, 4, 4, 4),
    46: (10, 6, 6, 4, 4, 4),
    47: (10, 7, 5, 5, 4, 4),
    48: (10, 7, 5, 5, 4, 4),
    49: (10, 7, 6, 5, 4, 4),
    50: (10, 7, 6, 5, 4, 4),
}


@dataclass(frozen=True, kw_only=True)
class MeasuredStartSteps:
    """One choice of start steps, and how near its draft came to the exact clip.

    Args:
        start_steps: by rank.
        rounds: until the steps of the draft are done; the exact clip takes N rounds.
        psnr_db: of the draft's frames against the exact clip's, for the worst photograph; None if
            they are equal.
        max_levels: the largest difference of one colour, in 8-bit levels.
    """

    start_steps: tuple[int, ...]
    rounds: int
    psnr_db: float | None
    max_levels: int

    @property
    def distance_db(self) -> float:
        """The PSNR as a number to compare."""
        return float("inf") if self.psnr_db is None else self.psnr_db


@dataclass(frozen=True, kw_only=True)
class DraftProfile:
    """What `svdpp profile --draft` writes: the best trade-offs between sooner and nearer.

    Args:
        model: what they were measured on.
        num_steps: N.
        photographs: names of the files.
        source: how they were measured.
        choices: those that no other one beats in both, by number of ranks, then of rounds.
    """

    model: str
    num_steps: int
    photographs: tuple[str, ...]
    source: str
    choices: tuple[MeasuredStartSteps, ...]

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @staticmethod
    def load(path: Path) -> DraftProfile:
        """The profile in a file.

        Raises:
            InputError: the file cannot be read, or is none.
        """
        try:
            content = json.loads(read_small_file(path, "starts"))
            if not is_version(content.pop("schema_version"), SCHEMA_VERSION):
                raise ValueError(f"schema_version must be {SCHEMA_VERSION}")
            choices = tuple(_choice(each) for each in content.pop("choices"))
            if not choices:
                raise ValueError("it holds no choices")
            photographs = tuple(map(str, content.pop("photographs")))
            return DraftProfile(choices=choices, photographs=photographs, **content)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(
                f"starts {str(path)!r} are no profile of a draft: {error}",
                "svdpp profile --draft writes one",
            ) from error

    def best(self, num_steps: int, world_size: int) -> tuple[int, ...]:
        """The start steps of the nearest draft within half the rounds; without one, of the soonest.

        Raises:
            RequestError: it was measured for other counts.
        """
        fitting = [each for each in self.choices if len(each.start_steps) == world_size]
        if self.num_steps != num_steps or not fitting:
            worlds = sorted({len(each.start_steps) for each in self.choices})
            raise RequestError(
                f"the starts were measured for {self.num_steps} steps and "
                f"{', '.join(map(str, worlds))} ranks, not for {num_steps} and {world_size}",
                "svdpp profile --draft measures others",
            )
        soon = [each for each in fitting if each.rounds <= default_rounds(num_steps)]
        if soon:
            return max(soon, key=lambda each: each.distance_db).start_steps
        return min(fitting, key=lambda each: each.rounds).start_steps


def parse_start_steps(text: str, num_steps: int, world_size: int | None) -> tuple[int, ...]:
    """`0,8,12,17`, or the best of a file for these counts.

    Raises:
        RequestError: the text is neither; InputError: the file cannot be read.
    """
    parts = text.split(",")
    if all(re.fullmatch(r"\s*[0-9]{1,9}\s*", part) for part in parts):
        return tuple(int(part) for part in parts)
    if not (text.endswith(".json") or os.path.isfile(text)):
        raise RequestError(
            f"--draft-starts must be steps or a profile's file, got {text!r}",
            "such as --draft-starts 0,14 or --draft-starts draft.json",
        )
    profile = DraftProfile.load(Path(text))
    if world_size is None:
        world_size = max(len(each.start_steps) for each in profile.choices)
    return profile.best(num_steps, world_size)


def default_rounds(num_steps: int) -> int:
    """The rounds of a draft by default: half the steps, and one more for its start."""
    return num_steps // 2 + 1


def most_ranks(num_steps: int) -> int:
    """The most ranks with default start steps: all start below N and end after half the rounds."""
    return min(MOST_RANKS, default_rounds(num_steps))


def measured_steps(num_steps: int) -> int:
    """The number of steps nearest to `num_steps` whose default start steps were measured."""
    return min(max(num_steps, min(_GAPS)), max(_GAPS))


def default_start_steps(num_steps: int, world_size: int) -> tuple[int, ...]:
    """Start steps of a draft that takes half the rounds, as near to the exact clip as is known.

    The start of the last rank follows from the rounds, the others from the gap between them. Gaps
    were measured for 14 to 50 steps; for other numbers they are scaled.

    Raises:
        RequestError: too few steps or ranks, or too many ranks.
    """
    most = most_ranks(num_steps)
    if num_steps < LEAST_STEPS or not 2 <= world_size <= most:
        raise RequestError(
            f"a draft of {num_steps} steps by {world_size} ranks has no default start steps",
            f"use --world 2 to {most}, or name the steps by --draft-starts"
            if num_steps >= LEAST_STEPS
            else f"use --steps {LEAST_STEPS} or more",
        )
    last = _last_start(num_steps, world_size, default_rounds(num_steps))
    return _spaced(last, _gap(num_steps, world_size, last), world_size)


def _gap(num_steps: int, world_size: int, last: int) -> int:
    """Steps between the starts of neighbours, from rank 1 on."""
    if world_size == 2:
        return 0
    measured = measured_steps(num_steps)
    scaled = round(_GAPS[measured][world_size - 3] * num_steps / measured)
    return max(1, min(scaled, (last - 1) // (world_size - 2)))


def candidates(num_steps: int, world_size: int) -> Iterator[tuple[int, ...]]:
    """Start steps worth measuring: drafts that take somewhat less than half the rounds, or more.

    From rank 1 on they have equal gaps: in a trial with 2 to 4 ranks and N = 28 no others were
    better.
    """
    half = default_rounds(num_steps)
    for rounds in sorted({half - half // 7, half, half + half // 5}):
        last = _last_start(num_steps, world_size, rounds)
        if not world_size - 1 <= last < num_steps:
            continue
        widest = (last - 1) // (world_size - 2) if world_size > 2 else 1
        for gap in range(1, widest + 1):
            yield _spaced(last, gap, world_size)


def best_trades(measured: list[MeasuredStartSteps]) -> tuple[MeasuredStartSteps, ...]:
    """Those that no other one with as many ranks beats in rounds and in distance."""
    kept = [
        each
        for each in measured
        if not any(_beats(other, each) for other in measured if other is not each)
    ]
    return tuple(sorted(kept, key=lambda each: (len(each.start_steps), each.rounds)))


def _beats(one: MeasuredStartSteps, other: MeasuredStartSteps) -> bool:
    if len(one.start_steps) != len(other.start_steps):
        return False
    sooner, nearer = other.rounds - one.rounds, one.distance_db - other.distance_db
    return sooner >= 0 and nearer >= 0 and (sooner > 0 or nearer > 0)


def _last_start(num_steps: int, world_size: int, rounds: int) -> int:
    """The step at which the last rank starts, to finish after `rounds`."""
    return world_size - 1 + num_steps - rounds


def _spaced(last: int, gap: int, world_size: int) -> tuple[int, ...]:
    """0, then starts `gap` apart up to the last one."""
    return 0, *(last - gap * behind for behind in range(world_size - 2, -1, -1))


def _choice(content: dict[str, Any]) -> MeasuredStartSteps:
    known = {field.name for field in fields(MeasuredStartSteps)}
    if content.keys() != known:
        raise ValueError(f"a choice has {', '.join(sorted(known))}")
    distance = content["psnr_db"]
    return MeasuredStartSteps(
        start_steps=tuple(map(int, content["start_steps"])),
        rounds=int(content["rounds"]),
        psnr_db=None if distance is None else float(distance),
        max_levels=int(content["max_levels"]),
    )
