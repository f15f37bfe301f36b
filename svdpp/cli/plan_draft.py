"""The output of `svdpp plan --draft`: ranks, picture and forecast of a draft plan."""

from __future__ import annotations

from typing import Any

from svdpp.cli.console import Console
from svdpp.cli.plan_report import SCHEMA_VERSION, Request, gib
from svdpp.plan.costs import Costs
from svdpp.plan.draft import DraftPlan
from svdpp.plan.sigmas import karras_sigmas

_NOT_STARTED, _STEP, _CORRECTED = ".", "o", "+"


def show_draft_plan(
    console: Console, request: Request, draft_plan: DraftPlan, costs: Costs
) -> None:
    """Prints the draft of one clip: start steps, rounds, and the forecast."""
    ready = draft_plan.ready_at(costs)
    console.infos(request.remarks)
    if console.as_json:
        console.json(_to_json(draft_plan, ready))
        return
    sigmas = karras_sigmas(draft_plan.num_steps)
    peaks = draft_plan.peak_gib(costs)
    known = any(peak is not None for peak in peaks)
    rows = [
        (
            str(rank),
            str(start),
            f"{sigmas[start]:.4g}",
            f"{draft_plan.rounds(rank)} of {draft_plan.num_steps}",
            f"{draft_plan.num_steps / draft_plan.rounds(rank):.2f}x",
            str(len(draft_plan.corrections(rank))),
            *([gib([peaks[rank]])] if known else []),
        )
        for rank, start in enumerate(draft_plan.start_steps)
    ]
    columns = ("rank", "start", "sigma", "rounds", "sooner", "corrected")
    console.table((*columns, *(["GiB"] if known else [])), rows)
    console.result()
    console.grid(draw_draft_plan(draft_plan))
    console.result("one step a round ->   o step, + step and correction, . not started or done")
    console.result()
    draft, exact = ready[-1], ready[0]
    console.result(
        f"draft after {draft:.4g} s, exact clip after {exact:.4g} s: the draft comes "
        f"{exact / draft:.2f}x sooner"
    )
    console.result(
        f"a draft takes {draft_plan.num_evaluations} steps on all ranks together, a clip without "
        f"draft {draft_plan.num_steps}: a pipeline makes {draft_plan.world_size} times as many "
        "clips of a queue"
    )


def draw_draft_plan(draft_plan: DraftPlan) -> list[str]:
    """One line for each rank, one column for each round."""
    digits = len(str(draft_plan.world_size - 1))
    lines = []
    for rank in range(draft_plan.world_size):
        corrected = {correction.at for correction in draft_plan.corrections(rank)}
        steps = range(draft_plan.start_steps[rank], draft_plan.num_steps)
        row = "".join(_CORRECTED if step + 1 in corrected else _STEP for step in steps)
        row = _NOT_STARTED * rank + row
        what = (
            "exact" if rank == 0 else ("draft" if rank == draft_plan.world_size - 1 else "nearer")
        )
        lines.append(
            f"rank {rank:>{digits}} |{row.ljust(draft_plan.num_steps, _NOT_STARTED)}| "
            f"{what} after {draft_plan.rounds(rank)}"
        )
    return lines


def _to_json(draft_plan: DraftPlan, ready: list[float]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "num_steps": draft_plan.num_steps,
        "world_size": draft_plan.world_size,
        "start_steps": list(draft_plan.start_steps),
        "evaluations": draft_plan.num_evaluations,
        "messages": draft_plan.num_messages,
        "ranks": [
            {
                "rank": rank,
                "start": start,
                "rounds": draft_plan.rounds(rank),
                "corrected_at": [correction.at for correction in draft_plan.corrections(rank)],
                "ready_seconds": ready[rank],
            }
            for rank, start in enumerate(draft_plan.start_steps)
        ],
        "draft_seconds": ready[-1],
        "exact_seconds": ready[0],
        "schedule": [[str(action) for action in actions] for actions in draft_plan.schedule([0])],
    }
