"""Owns what `svdpp plan --draft` prints: the ranks of a wave, its picture, and its forecast."""

from __future__ import annotations

from typing import Any

from svdpp.cli.console import Console
from svdpp.cli.plan_report import Request, gib
from svdpp.plan.costs import Costs
from svdpp.plan.draft import Wave
from svdpp.plan.sigmas import karras_sigmas

_NOT_STARTED, _STEP, _MENDED = ".", "o", "+"


def show_wave(console: Console, request: Request, wave: Wave, costs: Costs) -> None:
    """Prints one clip's draft: who starts where, the rounds, and the forecast.

    Args:
        console: where to.
        request: the unit of times; its clips come one after the other.
        wave: what to show.
        costs: of each kind of work.
    """
    ready = wave.ready_at(costs)
    if console.as_json:
        console.json(_to_json(wave, request, ready))
        return
    sigmas = karras_sigmas(wave.num_steps)
    peaks = wave.peak_gib(costs)
    known = any(peak is not None for peak in peaks)
    rows = [
        (
            str(rank),
            str(start),
            f"{sigmas[start]:.4g}",
            f"{wave.rounds(rank)} of {wave.num_steps}",
            f"{wave.num_steps / wave.rounds(rank):.2f}x",
            str(len(wave.meetings(rank))),
            *([gib([peaks[rank]])] if known else []),
        )
        for rank, start in enumerate(wave.starts)
    ]
    columns = ("rank", "start", "sigma", "rounds", "sooner", "mended")
    console.table((*columns, *(["GiB"] if known else [])), rows)
    console.result()
    console.grid(draw_wave(wave))
    console.result("one step a round ->   o a step, + a step and a mend, . not begun or done")
    console.result()
    draft, exact = ready[-1], ready[0]
    console.result(
        f"draft after {request.show(draft)}, exact clip after {request.show(exact)}: the draft "
        f"comes {exact / draft:.2f}x sooner"
    )
    console.result(
        f"a clip takes {wave.num_evaluations} steps on all ranks, where one takes "
        f"{wave.num_steps}: for a queue of clips a pipeline makes {wave.world_size} times as many"
    )


def draw_wave(wave: Wave) -> list[str]:
    """One line a rank, a column a round: begins later, ends sooner, is mended in between."""
    digits = len(str(wave.world_size - 1))
    lines = []
    for rank in range(wave.world_size):
        mended = {meeting.at for meeting in wave.meetings(rank)}
        steps = range(wave.starts[rank], wave.num_steps)
        row = "".join(_MENDED if step + 1 in mended else _STEP for step in steps)
        row = _NOT_STARTED * rank + row
        what = "exact" if rank == 0 else ("draft" if rank == wave.world_size - 1 else "nearer")
        lines.append(
            f"rank {rank:>{digits}} |{row.ljust(wave.num_steps, _NOT_STARTED)}| "
            f"{what} after {wave.rounds(rank)}"
        )
    return lines


def _to_json(wave: Wave, request: Request, ready: list[float]) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "num_steps": wave.num_steps,
        "world_size": wave.world_size,
        "starts": list(wave.starts),
        "unit": request.unit,
        "evaluations": wave.num_evaluations,
        "messages": wave.num_messages,
        "ranks": [
            {
                "rank": rank,
                "start": start,
                "rounds": wave.rounds(rank),
                "mended_at": [meeting.at for meeting in wave.meetings(rank)],
                "ready": ready[rank],
            }
            for rank, start in enumerate(wave.starts)
        ],
        "draft": ready[-1],
        "exact": ready[0],
        "schedule": [[str(action) for action in actions] for actions in wave.schedule([0])],
    }
