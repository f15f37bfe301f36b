"""Owns planted faults: deliberate damage with which a user or a test makes sure it is noticed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from svdpp.comm.header import FIELDS
from svdpp.errors import RequestError

Kind = Literal["ulp", "skip", "nan", "raise", "hang", "header"]

_PATTERN = re.compile(rf"({'|'.join(get_args(Kind))})(?:-([a-z]+))?@rank(\d+)\.clip(\d+)", re.ASCII)

#: Where each field of a packet's header begins that receivers check: all but the clip's times.
HEADER_FIELDS: Mapping[str, int] = {
    name: position for name, position in FIELDS.items() if name not in ("begun", "compute")
}


@dataclass(frozen=True)
class InjectedFault:
    """One fault, at one rank and clip.

    Kinds: `ulp` moves one element of the latent that leaves the rank to the next floating-point
    number; `skip` leaves out the rank's first step of the clip; `raise` raises before that step;
    `hang` stops there without an end; `nan` makes one element of the latent that enters the rank
    not a number; `header-FIELD` changes one field of the header that the rank sends.
    """

    kind: Kind
    rank: int
    clip: int
    field: str = ""

    @staticmethod
    def parse(text: str) -> InjectedFault:
        """A fault from text such as `ulp@rank1.clip0`.

        Raises:
            RequestError: the text is none.
        """
        match = _PATTERN.fullmatch(text)
        if match is None or not _has_field(match[1], match[2] or ""):
            raise RequestError(
                f"{text!r} is no fault", "write one as ulp@rank1.clip0 or skip@rank1.clip0"
            )
        kind, field, rank, clip = match.groups(default="")
        return InjectedFault(kind, int(rank), int(clip), field)  # type: ignore[arg-type]

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

    def tamper(self, rank: int) -> Callable[[int, bytes], bytes] | None:
        """What changes the headers that `rank` sends; None where it is to send them as they are."""
        if self.kind != "header" or rank != self.rank:
            return None
        position = HEADER_FIELDS[self.field]

        def change(clip: int, header: bytes) -> bytes:
            changed = bytearray(header)
            changed[position] ^= 8 if clip == self.clip else 0
            return bytes(changed)

        return change

    def reach(self, rank: int, clip: int, place: str) -> None:
        """Called as `rank` comes to a place of its life, where the suite's faults stop it."""


def _has_field(kind: str, field: str) -> bool:
    return field in HEADER_FIELDS if kind == "header" else not field


def one_ulp_off(latent: torch.Tensor) -> torch.Tensor:
    """A copy of `latent` whose middle element is the next larger number of its dtype."""
    changed = latent.clone().contiguous()
    middle = changed.view(-1)[changed.numel() // 2]
    middle.copy_(torch.nextafter(middle, torch.full_like(middle, torch.inf)))
    return changed
