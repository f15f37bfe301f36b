"""What `svdpp bench` prints: the figures of one bench, and the ratios of two."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from svdpp.cli.console import Console

if TYPE_CHECKING:
    from svdpp.bench.compare import Comparison, Ratio


def show_summary(console: Console, found: dict[str, Any]) -> None:
    """Prints a row for each case, the speed-ups, the shares of time, and whether bits agree."""
    from svdpp.diagnostics.utilisation import speed_text

    columns = ("case", "clips/min", "rounds", "first s", "step ms", "bubble", "start s", "GiB")
    console.result("figures: geometric means over rounds; of shares the mean, of GiB the largest")
    console.table(columns, [_row(case, about) for case, about in found["cases"].items()])
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
    speeds = [
        f"{case} {speed_text(about['over_rounds']['tflops'], about['over_rounds']['mfu'])}"
        for case, about in found["cases"].items()
        if about["over_rounds"].get("tflops") is not None
    ]
    if speeds:
        line = ", ".join(speeds)
        console.result(f"TFLOP/s of a rank while it computes (MFU): {line}")
    bits = "the same bits in every case" if found["same_bits"] else "DIFFERENT BITS between cases"
    console.result(f"latents and frames: {bits}")
    if found.get("targets"):
        headings = ("target", "bound", "value", "within", "")
        console.table(headings, [_target_row(*each) for each in found["targets"].items()])


def _target_row(name: str, outcome: dict[str, Any]) -> tuple[str, ...]:
    value, low, high = outcome["value"], outcome["low"], outcome["high"]
    measured = "-" if value is None else f"{value:.3g}"
    within = "-" if low is None else f"{low:.2g} to {high:.2g}"
    return name, outcome["target"], measured, within, outcome["verdict"]


def _row(case: str, about: dict[str, Any]) -> tuple[str, ...]:
    if not about["rounds"]:
        return (case, *["-"] * 7)
    figures = about["over_rounds"]
    rates = [each["steady_clips_per_minute"] for each in about["rounds"]]
    gib = figures["peak_allocated_gib"] or figures["peak_reserved_gib"]
    return (
        case,
        f"{figures['steady_clips_per_minute']:.3g}",
        f"{min(rates):.3g}-{max(rates):.3g}",
        f"{figures['first_clip_seconds']:.2f}",
        f"{figures['step_p50_seconds'] * 1000:.1f}",
        f"{figures['bubble']:.0%}",
        f"{figures['start_seconds']:.1f}",
        f"{gib:.2f}",
    )


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
    columns = ("figure", "A", "B", "B / A", "within", "")
    console.table(columns, [_ratio_row(ratio) for ratio in found.ratios])
    console.result()
    if found.same_bits is not None:
        console.result(f"latents: {'the same bits' if found.same_bits else 'DIFFERENT BITS'}")
    console.result(found.verdict)


def _ratio_row(ratio: Ratio) -> tuple[str, ...]:
    within = "-" if ratio.low is None else f"{ratio.low:.2g} to {ratio.high:.2g}"
    words = {True: "noise", False: "differs", None: "one round"}
    word = "drift" if ratio.is_baseline else words[ratio.is_noise]
    return ratio.name, f"{ratio.a:.4g}", f"{ratio.b:.4g}", f"{ratio.value:.3g}", within, word
