"""The result of a verification: the comparison of latents and frames, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from svdpp.media import video
from svdpp.models.base import Frames
from svdpp.worker.tensor_store import tensor_sha256

_INTEGERS = {2: torch.int16, 4: torch.int32}
_LEVELS = 255
_LOUDEST = 32767
_AXES = {"F": "frame", "S": "sample", "C": "channel", "H": "row", "W": "column"}
_FRAME_AXES = "FHWC"
_SVD_AXES = "BFCHW"


def describe_index(index: Sequence[int], axes: str) -> str:
    """An index in words, such as `frame 7, channel 0, row 22, column 40`.

    Args:
        index: one number for each of the first letters of `axes`.
        axes: B, F, C, H, W in the tensor's order; B is omitted, because it is always 0.
    """
    numbers = dict(zip(axes, index, strict=False))
    return ", ".join(f"{word} {numbers[axis]}" for axis, word in _AXES.items() if axis in numbers)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison of the pipelined result with the sequential one.

    Args:
        clip: index of the clip.
        what: `latent` at a transfer, `final_latent`, `frames`, `audio`, or `solver_history`, which
            is what a multistep solver keeps of earlier steps, listed only if it differs; so is
            `prediction`, what one rank of a pair has received from the other.
        step: number of steps done.
        rank: the rank that computed it.
        equal: bitwise, or within the tolerance if there is one.
        bitwise: whether every bit is equal.
        max_abs_diff: the largest difference; infinite if one side has NaN there. For frames, in
            colours from 0 to 1.
        max_ulp: the largest distance in ULPs of the dtype; for frames, in 8-bit levels.
        first_index: of the first element that differs, in row-major order; None if none differs.
        sha256: of the pipelined side.
        axes: the tensor's axes, one letter each.
        branch: of the guidance, 0 or 1, for a prediction; else -1.
        psnr_db: of a latent that differs, against the largest value of the sequential one.
    """

    clip: int
    what: Literal["latent", "final_latent", "frames", "audio", "solver_history", "prediction"]
    step: int
    rank: int
    equal: bool
    bitwise: bool
    max_abs_diff: float
    max_ulp: int
    first_index: tuple[int, ...] | None
    sha256: str
    axes: str = _SVD_AXES
    branch: int = -1
    psnr_db: float | None = None

    @property
    def distance(self) -> str:
        """The largest difference with its unit: `1.19e-07 (1 ULP)`, or `3 of 255 levels`."""
        if self.what == "frames":
            return f"{self.max_ulp} of {_LEVELS} levels"
        if self.what == "audio":
            return f"{self.max_ulp} of {_LOUDEST}"
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
        return (
            f"clip {self.clip}, {what}, done by rank {self.rank}: first at "
            f"{describe_index(index, self.axes)} (index {list(index)}), max difference "
            f"{self.distance}"
        )


@dataclass(frozen=True)
class VerificationResult:
    """All checks: by clip, then in the order of the steps.

    Args:
        checks: at least one.
    """

    checks: tuple[Check, ...]

    @property
    def equal(self) -> bool:
        """Whether every check is equal."""
        return all(check.equal for check in self.checks)

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
    *,
    clip: int,
    step: int,
    rank: int,
    final: bool,
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
        axes=axes,
        psnr_db=None if bitwise else _psnr_db(difference, theirs),
    )


def _psnr_db(difference: torch.Tensor, theirs: torch.Tensor) -> float | None:
    """None if it is not finite."""
    peak, error = float(theirs.double().abs().max()), float(difference.square().mean())
    ratio = peak**2 / error if error > 0 else math.inf
    return 10 * math.log10(ratio) if 0 < ratio < math.inf else None


def compare_frames(
    ours: Frames, theirs: Frames, *, clip: int, step: int, rank: int, tolerance: float = 0.0
) -> Check:
    """Compares two clips' frames (F, H, W, 3); the tolerance is in colours from 0 to 1."""
    if ours.shape != theirs.shape:
        raise ValueError(f"frames {ours.shape} against {theirs.shape}")
    difference = np.abs(ours.astype(np.int16) - theirs.astype(np.int16))
    sha256, place = video.frames_sha256(ours), {"clip": clip, "step": step, "rank": rank}
    return _of_levels(difference, _LEVELS, tolerance, "frames", sha256, _FRAME_AXES, place)


def compare_audio(
    ours: torch.Tensor, theirs: torch.Tensor, *, clip: int, step: int, rank: int, tolerance: float
) -> Check:
    """Compares two clips' samples (N, channels); the tolerance is a share of the loudest."""
    if ours.shape != theirs.shape:
        raise ValueError(f"samples {ours.shape} against {theirs.shape}")
    difference = (ours.int() - theirs.int()).abs().numpy()
    place = {"clip": clip, "step": step, "rank": rank}
    return _of_levels(difference, _LOUDEST, tolerance, "audio", tensor_sha256(ours), "SC", place)


def _of_levels(
    difference: NDArray[Any],
    highest: int,
    tolerance: float,
    what: Literal["frames", "audio"],
    sha256: str,
    axes: str,
    place: Mapping[str, int],
) -> Check:
    largest = int(difference.max())
    return Check(
        **place,
        what=what,
        equal=largest / highest <= tolerance,
        bitwise=largest == 0,
        max_abs_diff=largest / highest,
        max_ulp=largest,
        first_index=tuple(int(i) for i in np.argwhere(difference)[0]) if largest else None,
        sha256=sha256,
        axes=axes,
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
