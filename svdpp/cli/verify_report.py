"""Owns what `svdpp verify` prints: the checks, the verdict, and how far drafts are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from svdpp.cli.console import Console

if TYPE_CHECKING:
    from svdpp.runtime.verdict import Verdict


def print_verdict(console: Console, verdict: Verdict) -> None:
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


def print_drafts(console: Console, verdict: Verdict, num_steps: int) -> None:
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


def difference(verdict: Verdict) -> str:
    """The first difference, in words."""
    check = verdict.first_difference
    assert check is not None
    return f"not equal: {check}"
