"""Owns `svdpp verify CLIP...`: recomputes finished clips and prints the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from svdpp.cli.command import is_given
from svdpp.cli.console import Console
from svdpp.cli.options.declare import HIDDEN_NAMES
from svdpp.cli.verify_report import end_one, end_several
from svdpp.errors import RequestError

if TYPE_CHECKING:
    from svdpp.verification.clip_proof import ClipProof, Settings

# Parameters of `verify` that have an effect on finished clips.
_EFFECTIVE = frozenset(
    {
        *("inputs", "image", "threads", "local_files_only", "timeout", "start_timeout"),
        *("as_json", "verbose", "quiet", "debug", "log_file"),
    }
)


def refuse_without_effect(context: typer.Context) -> None:
    """Refuses options without effect on finished clips."""
    given = {
        str(parameter.name): next(
            name
            for name in reversed(parameter.opts)
            if name.startswith("--") and name not in HIDDEN_NAMES
        )
        for parameter in context.command.params
        if is_given(context, str(parameter.name)) and parameter.name not in _EFFECTIVE
    }
    if "report" in given:
        raise RequestError(
            "--report shows the frames of two runs, but a finished clip has only their hash",
            "verify the photograph: svdpp verify PHOTO --report FILE.html",
        )
    if given:
        raise RequestError(
            f"no effect on a finished clip: {', '.join(given.values())}; its metadata says how it "
            "was made, and one device recomputes it",
            "leave that out; svdpp verify PHOTO runs the ranks with it",
        )


def verify_clips(console: Console, inputs: Sequence[str], settings: Settings) -> None:
    """Verifies every clip in `inputs`, and prints the verdicts."""
    from svdpp.cli.progress import Progress
    from svdpp.plan.schedule import build_schedule, data_parallel_routes
    from svdpp.verification.clip_files import find_clips
    from svdpp.verification.clip_proof import plan_proofs, prove

    paths, passed_over = find_clips(inputs)
    for path in passed_over:
        console.info(f"{path} is skipped: it is not a clip")
    groups, proofs = plan_proofs(paths, settings)
    for tasks in groups:
        num_steps = tasks[0].config.sampling.num_inference_steps
        routes = data_parallel_routes(num_steps, 1, range(len(tasks)))
        names = [task.clip.path.name for task in tasks]
        schedule = build_schedule(routes, 1)
        with Progress(console, "verify", schedule, labels=names) as progress:
            proofs += prove(tasks, observers=(progress,))
    _end(console, proofs)


def _end(console: Console, proofs: list[ClipProof]) -> None:
    if len(proofs) == 1:
        end_one(console, proofs[0])
    else:
        end_several(console, sorted(proofs, key=lambda proof: proof.path))
