"""The output of `svdpp verify`: checks and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from svdpp.cli.console import Console, counted
from svdpp.errors import VerificationError, error_from_dict, error_to_dict, highest_code

if TYPE_CHECKING:
    from svdpp.verification.clip_proof import ClipProof
    from svdpp.verification.result import VerificationResult


_CONDITIONS = (
    "another machine or library version may give other bits; the metadata records the original ones"
)


def print_verdict(console: Console, verdict: VerificationResult) -> None:
    """Prints all checks, and one line with the verdict if they hold."""
    rows = [
        (
            str(check.clip),
            check.what.replace("_", " "),
            str(check.step),
            str(check.rank),
            "equal" if check.bitwise else ("within" if check.equal else "DIFFERENT"),
            "0" if check.bitwise else check.distance,
            check.sha256[:12],
        )
        for check in verdict.checks
    ]
    console.table(("clip", "what", "step", "rank", "verdict", "max difference", "sha256"), rows)
    if verdict.bitwise:
        clips = len({check.clip for check in verdict.checks})
        console.result(
            f"bitwise equal: {counted(clips, 'clip')}, "
            f"{len(verdict.checks)} comparisons with diffusers' sequential result"
        )
    elif verdict.equal:
        console.result(f"within tolerance, not bitwise: max difference {verdict.max_abs_diff:.3g}")


def difference(verdict: VerificationResult) -> str:
    """A sentence on the first difference."""
    check = verdict.first_difference
    assert check is not None
    return f"not equal: {check}"


def end_one(console: Console, proof: ClipProof) -> None:
    """Prints the verdicts on a single clip."""
    if proof.error is not None:
        raise proof.error
    if console.as_json:
        console.json({"schema_version": 2, **proof.to_json()})
    for check in proof.checks:
        word = "equal" if check.equal else "DIFFERENT" if check.found else "MISSING"
        sha256 = (check.found or "")[:12]
        console.result(f"{check.what:<7}{word:<10} {sha256:<13} {check.detail}".rstrip())
    name = proof.path.name
    if proof.different:
        raise VerificationError(_difference(proof), _CONDITIONS if _is_recomputed(proof) else "")
    console.result(f"bitwise equal: {name} is what diffusers computes, and its file is whole")


def end_several(console: Console, proofs: Sequence[ClipProof]) -> None:
    """Prints one line for each clip, and a summary."""
    different = [proof for proof in proofs if proof.different]
    errors = [proof.error for proof in proofs if proof.error is not None]
    if console.as_json:
        clips = [proof.to_json() for proof in proofs]
        equal = not different and not errors
        console.json({"schema_version": 2, "equal": equal, "clips": clips})
    counts = {
        "bitwise equal": len(proofs) - len(different) - len(errors),
        "different": len(different),
        "not verified": len(errors),
    }
    for proof in proofs:
        console.result(str(proof))
    summary = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    console.result(f"{len(proofs)} clips: {summary}")
    if different:
        raise VerificationError(
            f"{len(different)} of {len(proofs)} clips differ: {_difference(different[0])}",
            _CONDITIONS if any(map(_is_recomputed, different)) else "",
        )
    if errors:
        highest = highest_code(errors)
        message = f"{len(errors)} of {len(proofs)} clips not verified: {highest}"
        raise error_from_dict({**error_to_dict(highest), "message": message})


def _difference(proof: ClipProof) -> str:
    return f"{proof.path.name!r} is not as recorded: {proof.differences}"


def _is_recomputed(proof: ClipProof) -> bool:
    """Whether more differs than the file."""
    return any(check.what != "file" for check in proof.different)
