"""Owns what `svdpp verify` prints: checks, verdict, how far drafts are, and clips proved anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svdpp.cli.console import Console
from svdpp.errors import SvdppError, VerificationError, error_from_dict, error_to_dict, exit_code_of

if TYPE_CHECKING:
    from svdpp.verification.result import VerificationResult


_CONDITIONS = "same machine, library versions and threads? the JSON names those it was made with"


@dataclass(kw_only=True)
class ClipProof:
    """What came of one clip: its hashes beside the recorded ones, or what kept it from that."""

    path: Path
    checks: list[dict[str, str]] = field(default_factory=list)
    error: SvdppError | None = None

    @property
    def different(self) -> list[str]:
        """Names of the hashes that differ."""
        return [each["what"] for each in self.checks if each["recorded"] != each["recomputed"]]

    def to_json(self) -> dict[str, Any]:
        """Plain values; `equal` is null where that is not known."""
        if self.error is not None:
            return {"equal": None, "error": error_to_dict(self.error)}
        return {"equal": not self.different, "checks": self.checks}

    def __str__(self) -> str:
        if self.error is not None:
            return f"not verified: {self.path}: {self.error}"
        if self.different:
            return f"DIFFERENT: {self.path}: {', '.join(self.different)}"
        return f"bitwise equal: {self.path}"


def print_verdict(console: Console, verdict: VerificationResult) -> None:
    """Prints all checks, and the verdict in one line where it is a good one."""
    rows = [
        (
            str(check.clip),
            check.what.replace("_", " "),
            str(check.step),
            str(check.rank),
            "equal" if check.bitwise else ("within" if check.equal else "DIFFERENT"),
            f"{check.max_abs_diff:.3g}",
            str(check.max_ulp),
            check.sha256[:12],
        )
        for check in verdict.checks
    ]
    console.table(
        ("clip", "what", "step", "rank", "verdict", "max diff", "max ulp", "sha256"), rows
    )
    if verdict.bitwise:
        clips = len({check.clip for check in verdict.checks})
        console.result(
            f"bitwise equal: {clips} clip{'s' if clips > 1 else ''}, "
            f"{len(verdict.checks)} comparisons with diffusers' sequential result"
        )
    elif verdict.equal:
        console.result(f"within tolerance, not bitwise: max difference {verdict.max_abs_diff:.3g}")


def print_drafts(console: Console, verdict: VerificationResult, num_steps: int) -> None:
    """The other ranks' results, by how much sooner and how far from the exact one they are."""
    rows = [
        (
            str(each.clip),
            str(each.rank),
            str(each.start),
            f"{each.rounds} of {num_steps}",
            f"{num_steps / each.rounds:.2f}x",
            "lost" if each.latent_max_abs_diff is None else f"{each.latent_max_abs_diff:.3g}",
            "-" if each.frames is None else str(each.frames.whole),
        )
        for each in verdict.drafts
    ]
    columns = ("clip", "rank", "start", "rounds", "sooner", "latent diff", "draft's frames")
    console.result()
    console.table(columns, rows)


def difference(verdict: VerificationResult) -> str:
    """The first difference, in words."""
    check = verdict.first_difference
    assert check is not None
    return f"not equal: {check}"


def end_one(console: Console, proof: ClipProof) -> None:
    """Says what came of the only clip.

    Raises:
        SvdppError: it differs, or could not be computed anew.
    """
    if proof.error is not None:
        raise proof.error
    if console.as_json:
        console.json({"schema_version": 1, **proof.to_json()})
    if proof.different:
        raise VerificationError(
            f"{proof.path.name!r} is not what diffusers computes here: "
            f"{', '.join(proof.different)} differ",
            _CONDITIONS,
        )
    name = proof.path.name
    console.result(f"bitwise equal: {name} is what diffusers computes, latent and frames")


def end_several(console: Console, proofs: Sequence[ClipProof]) -> None:
    """Sums up what came of several clips, whose lines have been printed.

    Raises:
        SvdppError: one differs, or else the worst of what kept clips from being computed anew.
    """
    different = [proof for proof in proofs if proof.different]
    errors = [proof.error for proof in proofs if proof.error is not None]
    if console.as_json:
        clips = [{"json": str(proof.path), **proof.to_json()} for proof in proofs]
        equal = not different and not errors
        console.json({"schema_version": 1, "equal": equal, "clips": clips})
    counts = {
        "bitwise equal": len(proofs) - len(different) - len(errors),
        "different": len(different),
        "not verified": len(errors),
    }
    summary = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    console.result(f"{len(proofs)} clips: {summary}")
    if different:
        raise VerificationError(
            f"{len(different)} of {len(proofs)} clips differ from what diffusers computes here, "
            f"the first is {different[0].path.name!r}",
            _CONDITIONS,
        )
    if errors:
        worst = max(errors, key=exit_code_of)
        message = f"{len(errors)} of {len(proofs)} clips not verified: {worst}"
        raise error_from_dict({**error_to_dict(worst), "message": message})
