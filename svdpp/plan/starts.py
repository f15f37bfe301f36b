"""Owns which starts a draft takes where nobody names them, and the file of measured ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from svdpp.errors import InputError, RequestError

SCHEMA_VERSION = 1

# Where rank 1 starts, as a share of where the last rank does, by number of ranks: the best draft of
# those that `candidates` names, measured on the demo model with N = 28 (docs/draft.md).
_FIRST_START = {3: 0.5, 4: 0.5, 5: 0.4, 6: 0.35, 7: 0.3, 8: 0.25}
_LEAST_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class MeasuredStarts:
    """One choice of starts, and what it was measured to give.

    Args:
        starts: by rank.
        rounds: until the draft's steps are done, of as many as the clip has.
        psnr_db: of the draft's frames against the exact clip's, of the worst photograph; None
            where they were equal.
        max_levels: the largest difference of one colour, in 8-bit levels.
    """

    starts: tuple[int, ...]
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
        choices: those that no other beats in both, by number of ranks, then of rounds.
    """

    model: str
    num_steps: int
    photographs: tuple[str, ...]
    source: str
    choices: tuple[MeasuredStarts, ...]

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
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("schema_version") != SCHEMA_VERSION:
                raise ValueError(f"schema_version must be {SCHEMA_VERSION}")
            choices = tuple(_choice(each) for each in content.pop("choices"))
            photographs = tuple(map(str, content.pop("photographs")))
            return DraftProfile(choices=choices, photographs=photographs, **content)
        except OSError as error:
            raise InputError(f"starts {str(path)!r} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(
                f"starts {str(path)!r} are no profile of a draft: {error}",
                "svdpp profile --draft writes one",
            ) from error

    def best(self, num_steps: int, world_size: int) -> tuple[int, ...]:
        """The nearest draft that is there after half the rounds, or else the soonest.

        Raises:
            RequestError: it was measured for other counts.
        """
        fitting = [each for each in self.choices if len(each.starts) == world_size]
        if self.num_steps != num_steps or not fitting:
            worlds = sorted({len(each.starts) for each in self.choices})
            raise RequestError(
                f"the starts were measured for {self.num_steps} steps and "
                f"{', '.join(map(str, worlds))} ranks, not for {num_steps} and {world_size}",
                "svdpp profile --draft measures others",
            )
        soon = [each for each in fitting if each.rounds <= default_rounds(num_steps)]
        if soon:
            return max(soon, key=lambda each: each.distance_db).starts
        return min(fitting, key=lambda each: each.rounds).starts


def parse_starts(text: str, num_steps: int, world_size: int | None) -> tuple[int, ...]:
    """`0,8,12,17`, or the best of a file for these counts.

    Raises:
        RequestError: the text is neither; InputError: the file cannot be read.
    """
    parts = text.split(",")
    if all(part.strip().isdecimal() and part.isascii() for part in parts):
        return tuple(int(part) for part in parts)
    if not text.endswith(".json"):
        raise RequestError(
            f"--starts must be steps or a profile's file, got {text!r}",
            "such as --starts 0,14 or --starts draft.json",
        )
    profile = DraftProfile.load(Path(text))
    if world_size is None:
        world_size = max(len(each.starts) for each in profile.choices)
    return profile.best(num_steps, world_size)


def default_rounds(num_steps: int) -> int:
    """When a draft is to be there: after about half the steps, with one more for its start."""
    return num_steps // 2 + 1


def default_starts(num_steps: int, world_size: int) -> tuple[int, ...]:
    """Starts whose draft is there after half the rounds, as near to the exact clip as is known.

    The last rank's start follows from the rounds. The others lie at equal distances between it and
    the first one, whose place is measured (`_FIRST_START`).

    Raises:
        RequestError: so many ranks do not fit between the steps.
    """
    last = world_size - 1 + num_steps - default_rounds(num_steps)
    if world_size < 2 or last >= num_steps or last < world_size - 1:
        raise RequestError(
            f"no starts are known by which {world_size} ranks draft {num_steps} steps",
            "2 to 8 ranks and 14 to 50 steps have some; --starts names others",
        )
    share = _FIRST_START.get(world_size, _LEAST_SHARE)
    first = max(1, min(round(share * last), last - (world_size - 2)))
    return _evenly(first, last, world_size)


def candidates(num_steps: int, world_size: int) -> Iterator[tuple[int, ...]]:
    """Starts worth measuring: drafts from somewhat before to well after half the rounds."""
    half = default_rounds(num_steps)
    for rounds in sorted({half - half // 7, half, half + half // 5}):
        last = world_size - 1 + num_steps - rounds
        if not world_size - 1 <= last < num_steps:
            continue
        if world_size == 2:
            yield 0, last
            continue
        for first in range(max(1, last // 5), last * 5 // 8 + 1):
            starts = _evenly(first, last, world_size)
            if all(before < after for before, after in pairwise(starts)):
                yield starts


def best_trades(measured: list[MeasuredStarts]) -> tuple[MeasuredStarts, ...]:
    """Those that no other of as many ranks beats in rounds and distance both."""
    kept = [
        each
        for each in measured
        if not any(_beats(other, each) for other in measured if other is not each)
    ]
    return tuple(sorted(kept, key=lambda each: (len(each.starts), each.rounds)))


def _beats(one: MeasuredStarts, other: MeasuredStarts) -> bool:
    if len(one.starts) != len(other.starts):
        return False
    sooner, nearer = other.rounds - one.rounds, one.distance_db - other.distance_db
    return sooner >= 0 and nearer >= 0 and (sooner > 0 or nearer > 0)


def _evenly(first: int, last: int, world_size: int) -> tuple[int, ...]:
    if world_size == 2:
        return 0, last
    gaps = world_size - 2
    return 0, *(round(first + (last - first) * gap / gaps) for gap in range(gaps + 1))


def _choice(content: dict[str, Any]) -> MeasuredStarts:
    known = {field.name for field in fields(MeasuredStarts)}
    if content.keys() != known:
        raise ValueError(f"a choice has {', '.join(sorted(known))}")
    return MeasuredStarts(**{**content, "starts": tuple(map(int, content["starts"]))})
