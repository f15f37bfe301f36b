"""Owns what a comparison comes to: bits and distances of latents and frames, and the verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch

from svdpp.media import video
from svdpp.media.distance import Distance
from svdpp.models.base import Frames
from svdpp.worker.tensor_store import tensor_sha256

_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison of the pipelined result with the sequential one.

    Args:
        clip: index of the clip.
        what: `latent` at a hand-over, `final_latent`, or `frames`.
        step: number of steps done.
        rank: the one whose work it is.
        equal: bitwise, or within the tolerance where one was given.
        bitwise: every bit the same.
        max_abs_diff: largest difference; infinite where one side is not a number.
        max_ulp: largest distance, in numbers of the dtype; for frames, in 8-bit levels.
        first_index: where they first differ, in row-major order of the tensor; None where nowhere.
        sha256: of the pipelined side.
    """

    clip: int
    what: Literal["latent", "final_latent", "frames"]
    step: int
    rank: int
    equal: bool
    bitwise: bool
    max_abs_diff: float
    max_ulp: int
    first_index: tuple[int, ...] | None
    sha256: str

    def __str__(self) -> str:
        """Where and by how much the two sides differ, in words."""
        what = {
            "latent": f"the latent after step {self.step - 1}",
            "final_latent": "the final latent",
            "frames": "the frames",
        }[self.what]
        return (
            f"clip {self.clip}, {what}, done by rank {self.rank}: first at index "
            f"{list(self.first_index or ())}, max difference {self.max_abs_diff:.3g}, "
            f"{self.max_ulp} {'levels' if self.what == 'frames' else 'ULP'}"
        )


@dataclass(frozen=True, kw_only=True)
class DraftResult:
    """How far one rank's result of a draft is from the sequential one.

    Args:
        clip: index of the clip.
        rank: whose result; never rank 0, whose result has to be equal.
        start: the step at which the rank started.
        rounds: until it was done.
        latent_max_abs_diff: largest difference of the final latents; None where the walk was lost.
        frames: of the frames; None where there are none.
    """

    clip: int
    rank: int
    start: int
    rounds: int
    latent_max_abs_diff: float | None
    frames: Distance | None

    @property
    def is_lost(self) -> bool:
        """Whether the walk came to harm, and so to no result."""
        return self.latent_max_abs_diff is None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        values = {**vars(self), "lost": self.is_lost, "frames": None}
        return values if self.frames is None else {**values, **self.frames.to_json()}


@dataclass(frozen=True)
class VerificationResult:
    """All checks, in the order in which a clip meets them.

    Args:
        checks: at least one.
        drafts: of a draft, the other ranks' results: no checks, since they need not be equal.
    """

    checks: tuple[Check, ...]
    drafts: tuple[DraftResult, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether every check holds."""
        return all(check.equal for check in self.checks)

    @property
    def bitwise(self) -> bool:
        """Whether every bit is the same."""
        return all(check.bitwise for check in self.checks)

    @property
    def max_abs_diff(self) -> float:
        """The largest difference of any latent or frame."""
        return max(check.max_abs_diff for check in self.checks)

    @property
    def first_difference(self) -> Check | None:
        """The first check that does not hold: by clip, then in the order of the steps."""
        return next((check for check in self.checks if not check.equal), None)

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain values."""
        return {
            "schema_version": 1,
            "equal": self.equal,
            "bitwise": self.bitwise,
            "max_abs_diff": self.max_abs_diff,
            "checks": [asdict(check) for check in self.checks],
            **({"drafts": [each.to_json() for each in self.drafts]} if self.drafts else {}),
        }


def compare_latents(
    ours: torch.Tensor,
    theirs: torch.Tensor,
    *,
    clip: int,
    step: int,
    rank: int,
    final: bool,
    tolerance: float = 0.0,
) -> Check:
    """Compares two latents of one shape and dtype.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise ValueError(f"{ours.dtype} {ours.shape} against {theirs.dtype} {theirs.shape}")
    differs = _bits(ours) != _bits(theirs)
    bitwise = not bool(differs.any())
    # NaN against a number, or infinity against itself, has no difference to measure.
    difference = (ours.double() - theirs.double()).abs()
    difference = torch.where(differs, difference.nan_to_num(nan=torch.inf), 0.0)
    max_abs_diff = float(difference.max())
    return Check(
        clip=clip,
        what="final_latent" if final else "latent",
        step=step,
        rank=rank,
        equal=bitwise or 0 < tolerance >= max_abs_diff,
        bitwise=bitwise,
        max_abs_diff=max_abs_diff,
        max_ulp=int((_ordered(ours) - _ordered(theirs)).abs().max()),
        first_index=None if bitwise else tuple(int(i) for i in differs.nonzero()[0]),
        sha256=tensor_sha256(ours),
    )


def compare_frames(
    ours: Frames, theirs: Frames, *, clip: int, step: int, rank: int, tolerance: float = 0.0
) -> Check:
    """Compares two clips' frames (F, H, W, 3); a tolerance is of colours from 0 to 1.

    Raises:
        ValueError: shapes differ.
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"frames {ours.shape} against {theirs.shape}")
    difference = np.abs(ours.astype(np.int16) - theirs.astype(np.int16))
    largest = int(difference.max())
    return Check(
        clip=clip,
        what="frames",
        step=step,
        rank=rank,
        equal=largest / 255 <= tolerance,
        bitwise=largest == 0,
        max_abs_diff=largest / 255,
        max_ulp=largest,
        first_index=tuple(int(i) for i in np.argwhere(difference)[0]) if largest else None,
        sha256=video.frames_sha256(ours),
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers; distinguishes -0 from 0 and one NaN from another."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floating-point numbers, so that differences are ULPs.

    Bruce Dawson, "Comparing Floating Point Numbers": negative numbers count down from zero.
    """
    bits = _bits(tensor).long()
    lowest = -(2 ** (8 * tensor.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)
