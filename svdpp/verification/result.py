"""The result of a verification: the comparison of latents and frames, and the verdict."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from svdpp.worker.tensor_files import tensor_sha256

_INTEGERS = {2: torch.int16, 4: torch.int32}
_LEVELS = {"frames": 255, "audio": 32767}
_AXES = {"F": "frame", "S": "sample", "C": "channel", "H": "row", "W": "column"}
_SVD_AXES = "BFCHW"


class Place(NamedTuple):
    """Where a comparison belongs."""

    clip: int
    step: int
    """Number of steps done."""
    rank: int
    """The rank that computed it."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison of the pipelined result with the sequential one."""

    clip: int
    what: Literal["latent", "final_latent", "frames", "audio", "solver_history", "prediction"]
    """The last two are listed only if they differ: what a multistep solver keeps of earlier steps,
    and what one rank of a pair has received from the other."""
    step: int
    rank: int
    equal: bool
    """Bitwise, or within the tolerance if there is one."""
    bitwise: bool
    max_abs_diff: float
    """Infinite if one side has NaN there. Of frames and audio, a share of the highest level."""
    max_ulp: int
    """The largest distance in ULPs of the dtype; of frames and audio, in levels."""
    first_index: tuple[int, ...] | None
    """Of the first element that differs, in row-major order; None if none differs."""
    sha256: str
    """Of the pipelined side."""
    axes: str = _SVD_AXES
    """The tensor's axes, one letter each."""
    branch: int = -1
    """Of the guidance, 0 or 1, for a prediction."""
    psnr_db: float | None = None
    """Of a latent that differs, against the largest value of the sequential one."""

    @property
    def distance(self) -> str:
        """The largest difference with its unit: `1.19e-07 (1 ULP)`, or `3 of 255 levels`."""
        if self.what in _LEVELS:
            return f"{self.max_ulp} of {_LEVELS[self.what]} levels"
        ratio = "" if self.psnr_db is None else f", {self.psnr_db:.1f} dB"
        return f"{self.max_abs_diff:.3g} ({self.max_ulp} ULP{ratio})"

    def __str__(self) -> str:
        """The place and size of the difference, in words."""
        what = {
            "latent": f"the latent after step {self.step - 1}",
            "final_latent": "the final latent",
            "frames": "the frames",
            "audio": "the sound",
            "solver_history": f"the solver's history after step {self.step - 1}",
            "prediction": f"the prediction of branch {self.branch} in step {self.step}",
        }[self.what]
        index = self.first_index or ()
        numbers = dict(zip(self.axes, index, strict=False))  # B is always 0
        where = [f"{word} {numbers[axis]}" for axis, word in _AXES.items() if axis in numbers]
        return (
            f"clip {self.clip}, {what}, done by rank {self.rank}: first at {', '.join(where)} "
            f"(index {list(index)}), max difference {self.distance}"
        )


@dataclass(frozen=True)
class VerificationResult:
    """All checks, at least one: by clip, then in the order of the steps."""

    checks: tuple[Check, ...]

    @property
    def equal(self) -> bool:
        """Whether every check is equal."""
        return self.first_difference is None

    @property
    def bitwise(self) -> bool:
        """Whether every bit is equal."""
        return all(check.bitwise for check in self.checks)

    @property
    def max_abs_diff(self) -> float:
        """The largest difference of any latent or frame."""
        return max(check.max_abs_diff for check in self.checks)

    @property
    def first_difference(self) -> Check | None:
        """The first check that is not equal."""
        return next((check for check in self.checks if not check.equal), None)

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain values."""
        return {
            "schema_version": 1,
            "equal": self.equal,
            "bitwise": self.bitwise,
            "max_abs_diff": self.max_abs_diff,
            "checks": [asdict(check) for check in self.checks],
        }


def compare_latents(
    ours: torch.Tensor,
    theirs: torch.Tensor,
    place: Place,
    *,
    final: bool = False,
    tolerance: float = 0.0,
    axes: str = _SVD_AXES,
) -> Check:
    """Compares two latents of one shape and dtype."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise ValueError(f"{ours.dtype} {ours.shape} against {theirs.dtype} {theirs.shape}")
    differs = _bits(ours) != _bits(theirs)
    bitwise = not bool(differs.any())
    # Subtraction gives NaN for NaN and for two equal infinities.
    difference = (ours.double() - theirs.double()).abs()
    difference = torch.where(differs, difference.nan_to_num(nan=torch.inf), 0.0)
    max_abs_diff = float(difference.max())
    return Check(
        **place._asdict(),
        what="final_latent" if final else "latent",
        equal=bitwise or 0 < tolerance >= max_abs_diff,
        bitwise=bitwise,
        max_abs_diff=max_abs_diff,
        max_ulp=int((_ordered(ours) - _ordered(theirs)).abs().max()),
        first_index=None if bitwise else tuple(int(i) for i in differs.nonzero()[0]),
        sha256=tensor_sha256(ours),
        axes=axes,
        psnr_db=None if bitwise else _psnr_db(difference, theirs),
    )


def _psnr_db(difference: torch.Tensor, theirs: torch.Tensor) -> float | None:
    peak, error = float(theirs.double().abs().max()), float(difference.square().mean())
    ratio = peak**2 / error if error > 0 else math.inf
    return 10 * math.log10(ratio) if 0 < ratio < math.inf else None


def compare_levels(
    what: Literal["frames", "audio"],
    ours: NDArray[Any],
    theirs: NDArray[Any],
    place: Place,
    *,
    tolerance: float = 0.0,
) -> Check:
    """Compares frames (F, H, W, 3) or samples (N, channels); a tolerance of 1 is all levels."""
    if ours.shape != theirs.shape:
        raise ValueError(f"{what} {ours.shape} against {theirs.shape}")
    difference = np.abs(ours.astype(np.int32) - theirs.astype(np.int32))
    largest = int(difference.max())
    share = largest / _LEVELS[what]
    return Check(
        **place._asdict(),
        what=what,
        equal=share <= tolerance,
        bitwise=largest == 0,
        max_abs_diff=share,
        max_ulp=largest,
        first_index=tuple(int(i) for i in np.argwhere(difference)[0]) if largest else None,
        sha256=hashlib.sha256(np.ascontiguousarray(ours).data).hexdigest(),
        axes="FHWC" if what == "frames" else "SC",
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers; distinguishes -0 from 0 and one NaN from another."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floating-point numbers, so that differences are ULPs.

    See Bruce Dawson, "Comparing Floating Point Numbers": negative numbers count down from zero.
    """
    bits = _bits(tensor).long()
    lowest = -(2 ** (8 * tensor.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)
