"""Owns planted faults: deliberate damage with which a user or a test makes sure it is noticed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch

from svdpp.errors import RequestError

_PATTERN = re.compile(r"(ulp|skip|raise|hang)@rank(\d+)\.clip(\d+)", re.ASCII)


@dataclass(frozen=True)
class PlantedFault:
    """One fault, at one rank and clip.

    Kinds: `ulp` moves one element of the latent that leaves the rank to the next floating-point
    number; `skip` leaves out the rank's first step of the clip; `raise` raises before that step;
    `hang` stops there without an end.
    """

    kind: Literal["ulp", "skip", "raise", "hang"]
    rank: int
    clip: int

    @staticmethod
    def parse(text: str) -> PlantedFault:
        """A fault from text such as `ulp@rank1.clip0`.

        Raises:
            RequestError: the text is none.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise RequestError(
                f"{text!r} is no fault", "write one as ulp@rank1.clip0 or skip@rank1.clip0"
            )
        return PlantedFault(match[1], int(match[2]), int(match[3]))  # type: ignore[arg-type]

    def check(self, *, world_size: int, num_clips: int) -> None:
        """Makes sure that there is such a rank and clip.

        Raises:
            RequestError: the fault would strike nowhere.
        """
        if self.rank >= world_size or self.clip >= num_clips:
            raise RequestError(
                f"{self.kind}@rank{self.rank}.clip{self.clip} would strike nowhere: there are "
                f"{world_size} ranks and {num_clips} clips, counted from 0"
            )

    def strikes(self, kind: str, rank: int, clip: int) -> bool:
        """Whether this is the place."""
        return (self.kind, self.rank, self.clip) == (kind, rank, clip)

    def reach(self, rank: int, clip: int, place: str) -> None:
        """Called as `rank` comes to a place of its life; see `stops.PlantedStop`."""


def one_ulp_off(latent: torch.Tensor) -> torch.Tensor:
    """A copy of `latent` whose middle element is the next larger number of its dtype."""
    changed = latent.clone().contiguous()
    middle = changed.view(-1)[changed.numel() // 2]
    middle.copy_(torch.nextafter(middle, torch.full_like(middle, torch.inf)))
    return changed
