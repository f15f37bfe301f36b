"""What `svdpp bench` prints: the figures of one bench, and the ratios of two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from svdpp.cli.console import Console

if TYPE_CHECKING:
    from svdpp.bench.compare import Comparison, Ratio


def show_summary(console: Console, found: dict[str, Any]) -> None:
    """Prints a row for each case, the speed-ups, the shares of time, and whether bits agree."""
    console.result("figures: geometric means over rounds; of shares the mean, of GiB the largest")
    console.table([_row(case, about) for case, about in found["cases"].items()])
    for case, about in found["cases"].items():
        if about["error"]:
            console.result(f"{case}: {about['error']}")
    for case, speedup in found["speedups"].items():
        ratios = speedup["rounds"]
        console.result(
            f"pipeline over {case}: {speedup['over_rounds']:.3f} times the clips a minute "
            f"(rounds: {min(ratios):.3f} to {max(ratios):.3f})"
        )
    console.result(_accounted(found))
    console.result(f"what limits the pipeline: {found['limits']['headline']}")
    if found["limits"]["advice"]:
        console.result(f"  {found['limits']['advice']['command']}")
    bits = "the same bits in every case" if found["same_bits"] else "DIFFERENT BITS between cases"
    console.result(f"latents and frames: {bits}")
    if found.get("targets"):
        console.table(
            [
                {
                    "target": name,
                    "bound": outcome["target"],
                    "value": "-" if outcome["value"] is None else f"{outcome['value']:.3g}",
                    "within": within(outcome["low"], outcome["high"]),
                    "": outcome["verdict"],
                }
                for name, outcome in found["targets"].items()
            ]
        )


def within(low: float | None, high: float | None) -> str:
    """A range; a dash if it is unknown."""
    return "-" if low is None or high is None else f"{low:.2g} to {high:.2g}"


def _row(case: str, about: dict[str, Any]) -> dict[str, str]:
    columns = ("clips/min", "rounds", "first s", "step ms", "bubble", "start s", "GiB")
    if not about["rounds"]:
        return {"case": case, **dict.fromkeys(columns, "-")}
    figures = about["over_rounds"]
    rates = [each["steady_clips_per_minute"] for each in about["rounds"]]
    cells = (
        f"{figures['steady_clips_per_minute']:.3g}",
        f"{min(rates):.3g}-{max(rates):.3g}",
        f"{figures['first_clip_seconds']:.2f}",
        f"{figures['step_p50_seconds'] * 1000:.1f}",
        f"{figures['bubble']:.0%}",
        f"{figures['start_seconds']:.1f}",
        f"{figures['peak_allocated_gib'] or figures['peak_reserved_gib']:.2f}",
    )
    return {"case": case, **dict(zip(columns, cells, strict=True))}


def _accounted(found: dict[str, Any]) -> str:
    """The shares of the pipeline's time, including what is unaccounted for."""
    figures = found["cases"]["pipeline"]["over_rounds"]
    parts = ", ".join(
        f"{name} {figures[f'{name}_share']:.1%}"
        for name in ("compute", "wait", "transfer", "idle", "unaccounted")
    )
    return f"time of the pipeline's ranks: {parts}"


def show_comparison(console: Console, a: Path, b: Path, found: Comparison) -> None:
    """Prints differences of settings and machine, every ratio, and the verdict."""
    console.result(f"A {a}")
    console.result(f"B {b}")
    for what, lines in (("setting", found.settings), ("machine", found.machines)):
        for line in lines:
            console.result(f"{what} differs: {line}")
    console.result()
    console.result("A, B: geometric means over rounds")
    console.table([*map(_ratio_row, found.ratios)])
    console.result()
    if found.same_bits is not None:
        console.result(f"latents: {'the same bits' if found.same_bits else 'DIFFERENT BITS'}")
    console.result(found.verdict)


def _ratio_row(ratio: Ratio) -> dict[str, str]:
    words = {True: "noise", False: "differs", None: "one round"}
    return {
        "figure": ratio.name,
        "A": f"{ratio.a:.4g}",
        "B": f"{ratio.b:.4g}",
        "B / A": f"{ratio.value:.3g}",
        "within": within(ratio.low, ratio.high),
        "": "drift" if ratio.is_baseline else words[ratio.is_noise],
    }
