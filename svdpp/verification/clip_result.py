"""Classes for the verification of a finished clip: the task and the result."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.errors import SvdppError, error_to_dict
from svdpp.verification.clip_files import ClipCheck, ClipOnDisk


@dataclass(frozen=True, kw_only=True)
class VerificationTask:
    """Finished clip to verify, and the request that recomputes the clip."""

    clip: ClipOnDisk
    config: PipelineConfig
    request: ClipRequest
    pair_config: PipelineConfig | None = None
    """Configuration to make the clip again on two ranks, if two ranks ran each of its steps
    (`cfg_parallel` 2), so that its bits may differ from the reference's. None: one rank ran each
    step, or the metadata guarantee the bits of the reference (`exact` is true)."""

    @property
    def num_steps(self) -> int:
        """Number of denoising steps of the clip to verify."""
        return self.config.sampling.num_inference_steps


@dataclass(kw_only=True)
class ClipVerification:
    """Result of the verification of one clip: its checks, or an error."""

    path: Path
    """Path of the clip's file. If the clip could not be read, the path that the user gave."""
    checks: list[ClipCheck] = field(default_factory=list)
    """Checks of the clip; empty if an error prevented the verification."""
    error: SvdppError | None = None
    """Error that prevented the verification; None if the clip was verified."""

    @property
    def different(self) -> list[ClipCheck]:
        """Checks of a clip that have failed; empty if none has failed."""
        return [check for check in self.checks if check.equal is False]

    @property
    def verdict(self) -> str:
        """Verdict on a verified clip: `bitwise equal`, `within tolerance` or `different`."""
        if self.different:
            return "different"
        is_bitwise = all(check.equal and not check.within for check in self.checks)
        return "bitwise equal" if is_bitwise else "within tolerance"

    def to_json(self) -> dict[str, Any]:
        """Return the result of verifying a clip as plain values; `equal` is None after an error."""
        if self.error is not None:
            return {"clip": str(self.path), "equal": None, "error": error_to_dict(self.error)}
        checks = [{**asdict(check), "verdict": check.verdict} for check in self.checks]
        verdict = {"equal": not self.different, "verdict": self.verdict}
        return {"clip": str(self.path), **verdict, "checks": checks}

    def __str__(self) -> str:
        """Return the verdict on the clip as one line."""
        if self.error is not None:
            return f"not verified: {self.path}: {self.error}"
        if not self.different:
            return f"{self.verdict}: {self.path}{self._largest}"
        word = "DIFFERENT" if any(check.found for check in self.different) else "MISSING"
        return f"{word}: {self.path}: {self.differences}"

    @property
    def _largest(self) -> str:
        compared = [check for check in self.checks if check.max_abs_diff is not None]
        if not compared:
            return ""
        return "".join(f"; {check.what}: {check.detail}" for check in compared)

    @property
    def differences(self) -> str:
        """Description of a clip's failed checks."""
        return ", ".join(
            f"{check.what} ({check.detail})" if check.detail else check.what
            for check in self.different
        )
