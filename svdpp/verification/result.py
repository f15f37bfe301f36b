"""Comparison of tensors, bitwise or within a tolerance, and the result of verifying a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from svdpp.config.pipeline import repeats_bits
from svdpp.config.tolerance import BITWISE, Tolerance
from svdpp.errors import pluralize
from svdpp.worker.tensor_files import tensor_sha256

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LEVELS = {"frames": 255, "audio": 32767}
_AXES = {"F": "frame", "S": "sample", "C": "channel", "H": "row", "W": "column"}

TensorKind = Literal["latent", "final_latent", "frames", "audio", "solver_history", "prediction"]
Side = Literal["ranks", "reference"]
Verdict = Literal["bitwise equal", "within tolerance", "different"]


class CheckLocation(NamedTuple):
    """Clip, step and rank of a tensor that is compared."""

    clip: int
    step: int
    """Number of finished steps; for a prediction, the index of the step."""
    rank: int
    """Rank that computed the tensor in the pipelined run."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Result of comparing one tensor of the pipelined run with the reference's tensor."""

    clip: int
    what: TensorKind
    """Kind of the tensor. `solver_history` is a tensor of earlier steps that a multistep solver
    keeps. `prediction` is a prediction for one guidance branch, which one rank sent to the other
    rank with `cfg_parallel` 2. These two kinds are listed only if their bits differ."""
    step: int
    """Number of finished steps; for a prediction, the index of the step."""
    rank: int
    """Rank that computed the pipelined tensor."""
    equal: bool
    """Whether the check passes: every bit is equal, or every element is within the tolerance."""
    bitwise: bool
    """Whether every bit is equal."""
    max_abs_diff: float
    """Largest absolute difference of an element; infinite if one of the two elements is NaN. For
    frames and audio, the difference is a fraction of the highest level (255 or 32767)."""
    max_ulp: int
    """Largest difference of an element in ULPs of the dtype; for frames and audio, in levels."""
    first_index: tuple[int, ...] | None
    """Index of the first element, in row-major order, that is beyond the tolerance. If no element
    is beyond the tolerance, index of the first element whose bits differ. None if all bits are
    equal."""
    num_beyond: int
    """Number of elements beyond the tolerance."""
    sha256: str
    """SHA-256, in hex, of the tensor of the pipelined run."""
    axes: str = ""
    """Axes of the tensor, one letter each, such as FHWC for frame, height, width and channel; empty
    if they are not known."""
    branch: int = -1
    """Guidance branch of a prediction, 0 or 1; -1 for other kinds of tensors."""
    psnr_db: float | None = None
    """Peak signal-to-noise ratio of a latent in dB, with the reference's largest value as the peak.
    None if the latents are equal, or the ratio is not finite."""

    @property
    def verdict(self) -> Verdict:
        """Result of comparing a tensor: `bitwise equal`, `within tolerance` or `different`."""
        return _verdict(is_bitwise=self.bitwise, is_equal=self.equal)

    @property
    def distance(self) -> str:
        """Largest difference of a tensor, with unit: `1.19e-07 (1 ULP)`, or `3 of 255 levels`."""
        if self.what in _LEVELS:
            return f"{self.max_ulp} of {_LEVELS[self.what]} levels"
        ratio = "" if self.psnr_db is None else f", {self.psnr_db:.1f} dB"
        return f"{self.max_abs_diff:.3g} ({self.max_ulp} ULP{ratio})"

    @property
    def place(self) -> str:
        """Description of a compared tensor, with clip, step and rank."""
        what = {
            "latent": f"the latent after step {self.step - 1}",
            "final_latent": "the final latent",
            "frames": "the frames",
            "audio": "the sound",
            "solver_history": f"the solver's history after step {self.step - 1}",
            "prediction": f"the prediction of branch {self.branch} in step {self.step}",
        }[self.what]
        return f"clip {self.clip}, {what}, computed by rank {self.rank}"

    def __str__(self) -> str:
        """Describe how a tensor differs: name, first differing element, and largest difference.

        The description is one line of text.
        """
        index = self.first_index or ()
        numbers = dict(zip(self.axes, index, strict=False))
        where = [f"{word} {numbers[axis]}" for axis, word in _AXES.items() if axis in numbers]
        return (
            f"{self.place}: first at {', '.join(where)} (index {list(index)}), "
            f"max difference {self.distance}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the comparison of a tensor as plain values; an infinite difference is None."""
        difference = self.max_abs_diff if math.isfinite(self.max_abs_diff) else None
        return {**asdict(self), "verdict": self.verdict, "max_abs_diff": difference}


@dataclass(frozen=True)
class VerificationResult:
    """Result of verifying a pipelined run: all comparisons with the reference."""

    checks: tuple[Check, ...]
    """All checks (at least one), ordered by clip and then by step."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """Properties of the ranks that can change bits (hardware, versions, settings), by name."""
    tolerance: Tolerance = BITWISE
    reference: str = "diffusers' sequential result"
    """Name of the reference in messages."""
    short_of_memory: tuple[Side, ...] = ()
    """Sides (`ranks`, `reference`) on which GPU memory ran short. cuDNN may then have used another
    kernel, which can cause a difference."""

    @property
    def equal(self) -> bool:
        """Whether every compared tensor is equal, bitwise or within the tolerance."""
        return self.first_difference is None

    @property
    def bitwise(self) -> bool:
        """Whether all compared tensors are bitwise equal."""
        return all(check.bitwise for check in self.checks)

    @property
    def verdict(self) -> Verdict:
        """Result of verifying a run: `bitwise equal`, `within tolerance` or `different`."""
        return _verdict(is_bitwise=self.bitwise, is_equal=self.equal)

    @property
    def max_abs_diff(self) -> float:
        """Largest absolute difference from the reference among all compared tensors."""
        return self.largest.max_abs_diff

    @property
    def largest(self) -> Check:
        """Comparison of the tensor that differs most; the first one if several differ equally."""
        return max(self.checks, key=lambda check: (check.max_abs_diff, check.max_ulp))

    @property
    def first_difference(self) -> Check | None:
        """First comparison of a tensor that fails; None if all pass."""
        return next((check for check in self.checks if not check.equal), None)

    def __str__(self) -> str:
        """Return the verdict on a run as a sentence, with the largest difference if bits differ."""
        clips = len({check.clip for check in self.checks})
        compared = f"{pluralize(clips, 'clip')}, {pluralize(len(self.checks), 'comparison')}"
        if self.bitwise:
            return f"bitwise equal: {compared} with {self.reference}{self._remark}"
        largest = f"largest difference {self.largest.distance}, {self.largest.place}"
        first = self.first_difference
        if first is None:
            within = f"within tolerance ({largest}; {self.tolerance})"
            return f"{within}: {compared}, not all bitwise{self._remark}"
        if self.tolerance.is_bitwise:
            return f"not equal: {first}{self._cause}{self._remark}"
        return f"different, beyond {self.tolerance}: {first}; {largest}{self._cause}{self._remark}"

    @property
    def _cause(self) -> str:
        if not self.short_of_memory:
            return ""
        sides = " and ".join(f"the {side}" for side in self.short_of_memory)
        return f". GPU memory ran short in {sides}: cuDNN may have used another kernel there"

    @property
    def _remark(self) -> str:
        if repeats_bits(self.conditions):
            return ""
        backend = self.conditions.get("attention_backend")
        remark = f". The attention backend {backend} gives different bits for equal inputs here"
        if self.tolerance.is_bitwise:
            return f"{remark}: only a tolerance (atol) allows for that"
        return remark

    def failure_details(self) -> dict[str, Any]:
        """Return `details` for an error: the first tensor that differs, the largest difference."""
        first = self.first_difference
        return {
            **({} if first is None else first.to_json()),
            **asdict(self.tolerance),
            "largest_difference": self.largest.to_json(),
            "short_of_memory": list(self.short_of_memory),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the result of verifying a run as plain values."""
        largest = self.largest.to_json()
        names = ("clip", "what", "step", "rank", "max_abs_diff", "max_ulp")
        return {
            "schema_version": 1,
            "verdict": self.verdict,
            "equal": self.equal,
            "bitwise": self.bitwise,
            **asdict(self.tolerance),
            "max_abs_diff": largest["max_abs_diff"],
            "largest_difference": None if self.bitwise else {name: largest[name] for name in names},
            "checks": [check.to_json() for check in self.checks],
            "conditions": dict(self.conditions),
            "short_of_memory": list(self.short_of_memory),
        }


def _verdict(*, is_bitwise: bool, is_equal: bool) -> Verdict:
    if is_bitwise:
        return "bitwise equal"
    return "within tolerance" if is_equal else "different"


def compare_tensors(
    what: TensorKind,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    location: CheckLocation,
    axes: str = "",
    tolerance: Tolerance = BITWISE,
) -> Check:
    """Compare two tensors with the same shape and dtype, in host memory.

    Args:
        what: Kind of the tensors. The elements of frames (uint8) and audio (int16) are levels.
        ours: Tensor of the pipelined run.
        theirs: Tensor of the reference, to which `tolerance.rtol` is relative.
        location: Clip, step, and rank that computed `ours`.
        axes: Axes of the tensors, one letter each, for the description of a difference.
        tolerance: Allowed difference of each element. For frames and audio, `tolerance.atol` is a
            fraction of the highest level. Other integer tensors must be equal.

    Raises:
        ValueError: The tensors have different shapes or dtypes.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise ValueError(f"{what}: {ours.dtype} {ours.shape}, not {theirs.dtype} {theirs.shape}")
    differs = _bits(ours) != _bits(theirs)
    is_bitwise = not bool(differs.any())
    beyond, max_ulp, max_abs_diff, psnr_db = differs, 0, 0.0, None
    if not is_bitwise:
        max_ulp = int((_ordered_integers(ours) - _ordered_integers(theirs)).abs().max())
        # float32 represents levels exactly, and takes less memory.
        dtype = torch.float32 if what in _LEVELS else torch.float64
        scale, expected = _LEVELS.get(what, 1), theirs.to(dtype)
        # If an element is NaN, so is the difference, which must count as infinite. The difference
        # of two equal infinities is NaN, too; the next line makes it 0, because the bits are equal.
        difference = (ours.to(dtype) - expected).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        difference = torch.where(differs, difference, 0.0)
        max_abs_diff = float(difference.max()) / scale
        if what in _LEVELS:
            beyond = _exceeds_tolerance(differs, difference, expected, tolerance, scale)
        else:
            psnr_db = _psnr_db(difference, expected)
            if ours.is_floating_point():
                beyond = _exceeds_tolerance(differs, difference, expected, tolerance)
    num_beyond = int(beyond.count_nonzero())
    return Check(
        **location._asdict(),
        what=what,
        equal=num_beyond == 0,
        bitwise=is_bitwise,
        max_abs_diff=max_abs_diff,
        max_ulp=max_ulp,
        first_index=None if is_bitwise else _first_index(beyond if num_beyond else differs),
        num_beyond=num_beyond,
        sha256=tensor_sha256(ours),
        axes=axes,
        psnr_db=psnr_db,
    )


def _exceeds_tolerance(
    differs: torch.Tensor,
    difference: torch.Tensor,
    expected: torch.Tensor,
    tolerance: Tolerance,
    scale: int = 1,
) -> torch.Tensor:
    """Return a bool mask of a tensor's elements whose difference is larger than the tolerance."""
    if tolerance.is_bitwise:  # without a tolerance, all bits must be equal, even those of -0 and 0
        return differs
    allowed = tolerance.atol * scale + tolerance.rtol * expected.abs()
    return differs & (~(difference <= allowed) | difference.isinf())


def _first_index(differs: torch.Tensor) -> tuple[int, ...]:
    # `argmax` is used, because `nonzero` would need 8 bytes for each element and dimension.
    first = differs.flatten().byte().argmax()
    return tuple(map(int, torch.unravel_index(first, differs.shape)))


def _psnr_db(difference: torch.Tensor, theirs: torch.Tensor) -> float | None:
    peak, error = float(theirs.abs().max()), float(difference.square().mean())
    ratio = peak**2 / error if error > 0 else math.inf
    return 10 * math.log10(ratio) if 0 < ratio < math.inf else None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers, so that -0 and 0 differ, as do different NaNs."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def _ordered_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Map a float tensor to integers whose differences are numbers of ULPs.

    ULPs are units in the last place.

    The integers have the order of the floats: negative floats become negative integers; see Bruce
    Dawson, "Comparing Floating Point Numbers". Tensors of integers, such as pixels or audio
    samples, are returned unchanged.
    """
    if not tensor.is_floating_point():
        return tensor.int()
    bits = _bits(tensor).long()
    lowest = -(2 ** (8 * tensor.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)
