"""The default start steps of a draft, and the draft profile file."""

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

#: Default start steps exist for at most this many ranks and at least this many steps.
MOST_RANKS = 8
LEAST_STEPS = 4

# Steps between the start steps of neighbouring ranks, from rank 1 on, for 3, 4 ... 8 ranks and
# drafts that take half the rounds. For each number of steps it is the gap whose draft was closest
# to the exact clip on the demo model (64 x 64, 4 frames, one photograph; docs/draft.md). The gaps
# for 39, 41 to 44, 46, 47 and 49 steps are copied from a neighbouring number.
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
    """Start steps, with the measured distance of their draft from the exact clip.

    Args:
        start_steps: by rank.
        rounds: until the draft has done its steps; the exact clip takes N rounds.
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
        """The PSNR as a comparable number: infinite if the frames are equal."""
        return float("inf") if self.psnr_db is None else self.psnr_db


@dataclass(frozen=True, kw_only=True)
class DraftProfile:
    """The file that `svdpp profile --draft` writes: the best trade-offs of rounds and PSNR.

    Args:
        model: the model that was measured.
        num_steps: N.
        photographs: names of the files.
        source: how the choices were measured.
        choices: those that no other choice beats in rounds and PSNR, sorted by number of ranks,
            then by rounds.
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
        """The profile in a file."""
        try:
            content = json.loads(read_small_file(path, "draft profile"))
            if not is_version(content.pop("schema_version"), SCHEMA_VERSION):
                raise ValueError(f"schema_version must be {SCHEMA_VERSION}")
            choices = tuple(_choice(each) for each in content.pop("choices"))
            if not choices:
                raise ValueError("it has no choices")
            photographs = tuple(map(str, content.pop("photographs")))
            return DraftProfile(choices=choices, photographs=photographs, **content)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(
                f"{str(path)!r} is not a draft profile: {error}",
                "svdpp profile --draft writes one",
            ) from error

    def best(self, num_steps: int, world_size: int) -> tuple[int, ...]:
        """The start steps of the highest PSNR within half the rounds, else of the fewest rounds."""
        fitting = [each for each in self.choices if len(each.start_steps) == world_size]
        if self.num_steps != num_steps or not fitting:
            worlds = sorted({len(each.start_steps) for each in self.choices})
            raise RequestError(
                f"the draft profile is for {self.num_steps} steps and "
                f"{', '.join(map(str, worlds))} ranks, not for {num_steps} and {world_size}",
                "svdpp profile --draft measures other counts",
            )
        soon = [each for each in fitting if each.rounds <= default_rounds(num_steps)]
        if soon:
            return max(soon, key=lambda each: each.distance_db).start_steps
        return min(fitting, key=lambda each: each.rounds).start_steps


def parse_start_steps(text: str, num_steps: int, world_size: int | None) -> tuple[int, ...]:
    """Parse start steps such as `0,8,12,17`, or take the best ones of a draft profile.

    Args:
        text: the steps, or the path of a profile.
        num_steps: N, for a profile.
        world_size: W, for a profile; None: the largest in it.
    """
    parts = text.split(",")
    if all(re.fullmatch(r"\s*[0-9]{1,9}\s*", part) for part in parts):
        return tuple(int(part) for part in parts)
    if not (text.endswith(".json") or os.path.isfile(text)):
        raise RequestError(
            f"--draft-starts must be steps or the path of a draft profile, got {text!r}",
            "such as --draft-starts 0,14 or --draft-starts draft.json",
        )
    profile = DraftProfile.load(Path(text))
    if world_size is None:
        world_size = max(len(each.start_steps) for each in profile.choices)
    return profile.best(num_steps, world_size)


def default_rounds(num_steps: int) -> int:
    """The default number of rounds of a draft: half the steps, and one for its start."""
    return num_steps // 2 + 1


def most_ranks(num_steps: int) -> int:
    """The most ranks with default start steps; each starts below N."""
    return min(MOST_RANKS, default_rounds(num_steps))


def measured_steps(num_steps: int) -> int:
    """The number of steps closest to `num_steps` for which gaps were measured."""
    return min(max(num_steps, min(_GAPS)), max(_GAPS))


def default_start_steps(num_steps: int, world_size: int) -> tuple[int, ...]:
    """Start steps of a draft that takes half the rounds, with the highest PSNR measured.

    The start step of the last rank follows from the rounds, the others from the gap between them.
    The gaps were measured for 14 to 50 steps; for other numbers they are scaled.
    """
    most = most_ranks(num_steps)
    if num_steps < LEAST_STEPS or not 2 <= world_size <= most:
        raise RequestError(
            f"a draft of {num_steps} steps by {world_size} ranks has no default start steps",
            f"use --world 2 to {most}, or give the start steps with --draft-starts"
            if num_steps >= LEAST_STEPS
            else f"use --steps {LEAST_STEPS} or more",
        )
    last = _last_start(num_steps, world_size, default_rounds(num_steps))
    return _spaced(last, _gap(num_steps, world_size, last), world_size)


def _gap(num_steps: int, world_size: int, last: int) -> int:
    """Steps between the start steps of neighbouring ranks, from rank 1 on."""
    if world_size == 2:
        return 0
    measured = measured_steps(num_steps)
    scaled = round(_GAPS[measured][world_size - 3] * num_steps / measured)
    return max(1, min(scaled, (last - 1) // (world_size - 2)))


def candidates(num_steps: int, world_size: int) -> Iterator[tuple[int, ...]]:
    """Start steps to measure: drafts that take about half the rounds.

    From rank 1 on the gaps are equal: in a trial with 2 to 4 ranks and N = 28 unequal gaps were not
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
    """The choices that no other one of as many ranks beats in rounds and PSNR, sorted."""
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
    """The start step with which the last rank finishes after `rounds`."""
    return world_size - 1 + num_steps - rounds


def _spaced(last: int, gap: int, world_size: int) -> tuple[int, ...]:
    """0, then start steps that are `gap` apart and end with `last`."""
    return 0, *(last - gap * behind for behind in range(world_size - 2, -1, -1))


def _choice(content: dict[str, Any]) -> MeasuredStartSteps:
    known = {field.name for field in fields(MeasuredStartSteps)}
    if content.keys() != known:
        raise ValueError(f"the keys of a choice are {', '.join(sorted(known))}")
    distance = content["psnr_db"]
    return MeasuredStartSteps(
        start_steps=tuple(map(int, content["start_steps"])),
        rounds=int(content["rounds"]),
        psnr_db=None if distance is None else float(distance),
        max_levels=int(content["max_levels"]),
    )
