"""Injected faults: deliberate damage, to prove that the program detects it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from svdpp.comm.header import FIELDS
from svdpp.errors import RequestError
from svdpp.models.base import LATENTS, Tensors, solver_history

Kind = Literal["ulp", "state", "prediction", "skip", "nan", "raise", "hang", "header"]

_PATTERN = re.compile(rf"({'|'.join(get_args(Kind))})(?:-([a-z]+))?@rank(\d+)\.clip(\d+)", re.ASCII)

#: The offset of each header field that receivers check: all but the clip's times.
HEADER_FIELDS: Mapping[str, int] = {
    name: position for name, position in FIELDS.items() if name not in ("begun", "compute")
}


@dataclass(frozen=True)
class InjectedFault:
    """One fault, at one rank and clip.

    Kinds: `ulp` changes one element of the latent that leaves the rank to the next larger
    floating-point number; `state` does so in the history of a multistep solver; `prediction` in the
    first prediction that a rank of a pair sends to the other one; `skip` omits the
    rank's first step of the clip; `raise` raises before that step; `hang` hangs there; `nan` fills
    the latent that enters the rank with NaN; `header-FIELD` changes one field of the header that
    the rank sends.
    """

    kind: Kind
    rank: int
    clip: int
    field: str = ""

    @staticmethod
    def parse(text: str) -> InjectedFault:
        """A fault from text such as `ulp@rank1.clip0`."""
        match = _PATTERN.fullmatch(text)
        if match is None or not _has_field(match[1], match[2] or ""):
            raise RequestError(
                f"{text!r} is not a fault", "write one as ulp@rank1.clip0 or skip@rank1.clip0"
            )
        kind, field, rank, clip = match.groups(default="")
        return InjectedFault(kind, int(rank), int(clip), field)  # type: ignore[arg-type]

    def check(self, *, world_size: int, num_clips: int) -> None:
        """Checks that the run has this rank and clip."""
        if self.rank >= world_size or self.clip >= num_clips:
            raise RequestError(
                f"{self.kind}@rank{self.rank}.clip{self.clip} is outside the run: it has "
                f"{world_size} ranks and {num_clips} clips, counted from 0"
            )

    def strikes(self, kind: str, rank: int, clip: int) -> bool:
        """Whether this fault is of `kind`, at `rank` and `clip`."""
        return (self.kind, self.rank, self.clip) == (kind, rank, clip)

    def skipped_steps(self, rank: int, clip: int) -> int:
        """Called before the rank's first step of a clip; returns how many steps it leaves out.

        Raises or hangs if that is the fault.
        """
        if self.strikes("raise", rank, clip):
            raise RuntimeError("an injected fault")
        while self.strikes("hang", rank, clip):
            time.sleep(1)
        return int(self.strikes("skip", rank, clip))

    def received(self, rank: int, clip: int, tensors: Tensors) -> Tensors:
        """The tensors with which the rank starts, given those that it has received."""
        if self.strikes("nan", rank, clip):
            return {**tensors, LATENTS: torch.full_like(tensors[LATENTS], torch.nan)}
        return tensors

    def sent(self, rank: int, clip: int, tensors: Tensors) -> Tensors:
        """The tensors that the rank sends, given those that it has computed."""
        name = LATENTS if self.strikes("ulp", rank, clip) else None
        if self.strikes("state", rank, clip):
            name = next(iter(solver_history(tensors)), None)
        return tensors if name is None else {**tensors, name: one_ulp_off(tensors[name])}

    def predicted(self, rank: int, clip: int, tensors: Tensors) -> Tensors:
        """The prediction that a rank of a pair sends, given what it has computed."""
        if not self.strikes("prediction", rank, clip):
            return tensors
        return {name: one_ulp_off(tensor) for name, tensor in tensors.items()}

    def tamper(self, rank: int) -> Callable[[int, bytes], bytes] | None:
        """The function that changes the headers `rank` sends; None if they stay as they are."""
        if self.kind != "header" or rank != self.rank:
            return None
        position = HEADER_FIELDS[self.field]

        def change(clip: int, header: bytes) -> bytes:
            changed = bytearray(header)
            changed[position] ^= 8 if clip == self.clip else 0
            return bytes(changed)

        return change

    def reach(self, rank: int, clip: int, place: str) -> None:
        """Called when `rank` reaches `place`, such as `load`; tests override it to stop a rank."""


def _has_field(kind: str, field: str) -> bool:
    return field in HEADER_FIELDS if kind == "header" else not field


def one_ulp_off(latent: torch.Tensor) -> torch.Tensor:
    """A copy of `latent` whose middle element is the next larger number of its dtype."""
    changed = latent.clone().contiguous()
    middle = changed.view(-1)[changed.numel() // 2]
    middle.copy_(torch.nextafter(middle, torch.full_like(middle, torch.inf)))
    return changed
