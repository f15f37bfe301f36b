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


def end(console: Console, proofs: Sequence[ClipProof]) -> None:
    """Prints the checks of a single clip, or a line for each of several and a summary."""
    different = [proof for proof in proofs if proof.different]
    errors = [proof.error for proof in proofs if proof.error is not None]
    is_single = len(proofs) == 1
    if is_single and errors:
        raise errors[0]
    if console.as_json:
        equal = not different and not errors
        several = {"equal": equal, "clips": [proof.to_json() for proof in proofs]}
        console.json({"schema_version": 2, **(proofs[0].to_json() if is_single else several)})
    if is_single:
        _print_checks(console, proofs[0])
    else:
        for proof in proofs:
            console.result(str(proof))
        counts = {
            "bitwise equal": len(proofs) - len(different) - len(errors),
            "different": len(different),
            "not verified": len(errors),
        }
        summary = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        console.result(f"{len(proofs)} clips: {summary}")
    many = f"{len(different or errors)} of {len(proofs)} clips"
    if different:
        words = _difference(different[0])
        raise VerificationError(
            words if is_single else f"{many} differ: {words}",
            _CONDITIONS if any(map(_is_recomputed, different)) else "",
        )
    if errors:
        highest = highest_code(errors)
        record = {**error_to_dict(highest), "message": f"{many} not verified: {highest}"}
        raise error_from_dict(record)


def _print_checks(console: Console, proof: ClipProof) -> None:
    for check in proof.checks:
        word = "equal" if check.equal else "DIFFERENT" if check.found else "MISSING"
        sha256 = (check.found or "")[:12]
        console.result(f"{check.what:<7}{word:<10} {sha256:<13} {check.detail}".rstrip())
    if not proof.different:
        name = proof.path.name
        console.result(f"bitwise equal: {name} is what diffusers computes, and its file is whole")


def _difference(proof: ClipProof) -> str:
    return f"{proof.path.name!r} is not as recorded: {proof.differences}"


def _is_recomputed(proof: ClipProof) -> bool:
    """Whether more differs than the file."""
    return any(check.what != "file" for check in proof.different)
