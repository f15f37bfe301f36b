"""Owns the sweep over a draft's start steps: the distance of each draft from the exact clip."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from svdpp.config import ClipRequest, PipelineConfig
from svdpp.diagnostics import rank_probe
from svdpp.diagnostics.draft_simulator import DraftSimulator
from svdpp.driver.resolve import resolve
from svdpp.errors import RequestError
from svdpp.launch.group import RankContext
from svdpp.media import image as photos
from svdpp.media.distance import distance
from svdpp.models.base import DraftableModel
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.draft import DraftPlan
from svdpp.plan.draft_starts import MeasuredStartSteps, candidates
from svdpp.plan.layout import Roles
from svdpp.worker.device import device_of
from svdpp.worker.rank import load_model

_ALL_PARTS = Roles(encode=True, denoise=True, decode=True)
_Asked = tuple[Checkpoint | None, Sequence[str], int, Sequence[tuple[int, ...]]]


def measure_start_steps(
    config: PipelineConfig,
    photographs: Sequence[Path],
    *,
    seed: int = 0,
    start_steps: Sequence[tuple[int, ...]] = (),
) -> list[MeasuredStartSteps]:
    """Measures every candidate draft plan for 2 to W ranks, each photograph in one process.

    Args:
        config: its world size is the number of processes, and the largest number of ranks; its
            steps are those of the clips.
        photographs: one or more, distributed over the processes.
        seed: of every clip.
        start_steps: measured instead of the candidates, if given.
    """
    num_steps = config.sampling.num_inference_steps
    asked = list(start_steps) or [
        each for world in range(2, config.world_size + 1) for each in candidates(num_steps, world)
    ]
    if not asked:
        raise RequestError(
            f"no draft of 2 ranks or more fits into {num_steps} steps", "give more --steps"
        )
    plans = [DraftPlan(num_steps=num_steps, start_steps=each) for each in asked]
    processes = min(config.world_size, len(photographs))
    one = replace(config, world_size=processes, split="uniform", replicas=processes)
    resolved, checkpoint = resolve(one)
    names = [str(path) for path in photographs]
    answers = rank_probe.ask_ranks(_measure, resolved, (checkpoint, names, seed, asked))
    distances = defaultdict(list)
    for answer in answers:
        for index, (psnr_db, max_levels) in answer["distances"]:
            distances[index].append((psnr_db, max_levels))
    return [_worst(draft_plan, distances[index]) for index, draft_plan in enumerate(plans)]


def _worst(
    draft_plan: DraftPlan, distances: Sequence[tuple[float | None, int]]
) -> MeasuredStartSteps:
    known = [psnr_db for psnr_db, _ in distances if psnr_db is not None]
    return MeasuredStartSteps(
        start_steps=draft_plan.start_steps,
        rounds=draft_plan.rounds(draft_plan.world_size - 1),
        psnr_db=min(known, default=None),
        max_levels=max(levels for _, levels in distances),
    )


def _measure(context: RankContext, config: PipelineConfig, asked: _Asked) -> dict[str, Any]:
    checkpoint, names, seed, all_start_steps = asked
    world, sampling = context.world, config.sampling
    model = load_model(config, checkpoint, device_of(config, world), _ALL_PARTS)
    assert isinstance(model, DraftableModel), "a draft needs Euler's method"
    found = []
    for name in names[world.rank :: world.size]:
        photo, _ = photos.read_photo(Path(name))
        fitted = photos.fit_photo(photo, sampling.width, sampling.height, sampling.fit)
        tensors = model.encode(model.prepare(fitted), ClipRequest(seed=seed))
        drafts = DraftSimulator(model, tensors, sampling.num_inference_steps)
        exact = drafts.frames((0,))
        for index, start_steps in enumerate(all_start_steps):
            whole = distance(drafts.frames(tuple(start_steps)), exact).whole.to_json()
            found.append((index, (whole["psnr_db"], whole["max_levels"])))
            # Plans are sorted by their start steps, so neighbours share their first ranks.
            drafts.forget(depth=2)
    return {"distances": found}
