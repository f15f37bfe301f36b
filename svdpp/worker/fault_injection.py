"""Injected faults: deliberate damage, to prove that the program detects it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from svdpp.errors import RequestError
from svdpp.models.base import LATENTS, Tensors

_PATTERN = re.compile(r"(ulp|skip)@rank(\d+)\.clip(\d+)", re.ASCII)


@dataclass(frozen=True)
class InjectedFault:
    """One fault, at one rank and clip; the tests derive others from it.

    Kinds: `ulp` changes one element of the latent that leaves the rank to the next larger
    floating-point number; `skip` omits the rank's first step of the clip. A fault at one rank of a
    pair is one of the pair, whose ranks do the same steps; `partner` is the other rank, or -1.
    """

    kind: str
    rank: int
    clip: int

    @staticmethod
    def parse(text: str) -> InjectedFault:
        """A fault from text such as `ulp@rank1.clip0`."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise RequestError(
                f"{text!r} is not a fault", "write one as ulp@rank1.clip0 or skip@rank1.clip0"
            )
        return InjectedFault(match[1], int(match[2]), int(match[3]))

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

    def skipped_steps(self, rank: int, clip: int, partner: int) -> int:
        """Called before the rank's first step of a clip; returns how many steps it leaves out."""
        return int(self.strikes("skip", rank, clip) or self.strikes("skip", partner, clip))

    def received(self, rank: int, clip: int, tensors: Tensors) -> Tensors:  # noqa: ARG002
        """The tensors with which the rank starts, given those that it has received."""
        return tensors

    def sent(self, rank: int, clip: int, tensors: Tensors, partner: int) -> Tensors:
        """The tensors that the rank sends, given those that it has computed."""
        if self.strikes("ulp", rank, clip) or self.strikes("ulp", partner, clip):
            return {**tensors, LATENTS: one_ulp_off(tensors[LATENTS])}
        return tensors

    def predicted(self, rank: int, clip: int, tensors: Tensors) -> Tensors:  # noqa: ARG002
        """The prediction that a rank of a pair sends, given what it has computed."""
        return tensors

    def tamper(self, rank: int) -> Callable[[int, bytes], bytes] | None:  # noqa: ARG002
        """The function that changes the headers `rank` sends; None if they stay as they are."""
        return None

    def reach(self, rank: int, clip: int, place: str) -> None:
        """Called when `rank` reaches `place`, such as `load`."""


#: Strikes nowhere.
NO_FAULT = InjectedFault("none", -1, -1)


def one_ulp_off(latent: torch.Tensor) -> torch.Tensor:
    """A copy of `latent` whose middle element is the next larger number of its dtype."""
    changed = latent.clone().contiguous()
    middle = changed.view(-1)[changed.numel() // 2]
    middle.copy_(torch.nextafter(middle, torch.full_like(middle, torch.inf)))
    return changed
