"""The sweep over start steps: each draft, computed in one process, and its distance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from svdpp.comm.streams import SideStream, mark
from svdpp.config import ClipRequest, PipelineConfig
from svdpp.diagnostics import rank_probe
from svdpp.driver.resolve import resolve
from svdpp.errors import RequestError
from svdpp.launch.group import RankContext
from svdpp.media import image as photos
from svdpp.media.distance import distance
from svdpp.models.base import LATENTS, DraftableModel, Frames, Tensors
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.draft import DraftPlan
from svdpp.plan.draft_starts import MeasuredStartSteps, candidates
from svdpp.plan.layout import Roles
from svdpp.worker.device import device_of
from svdpp.worker.draft_sampler import DraftSampler, Evaluation
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


@dataclass(frozen=True)
class _Sampled:
    """One rank's latent after the last step, its state before each step, and the noise levels."""

    latent: torch.Tensor
    states: dict[int, Evaluation]
    sigmas: torch.Tensor


class DraftSimulator:
    """The ranks of many draft plans for one clip; each rank is computed once.

    A rank's result depends only on its own start step and those of the ranks before it, so plans
    with the same first start steps share these ranks.

    Args:
        model: with all its parts.
        tensors: of the clip, from `encode`.
        num_steps: number of denoising steps.
    """

    def __init__(
        self,
        model: DraftableModel,
        tensors: Tensors,
        num_steps: int,
    ) -> None:
        self._model = model
        self._tensors = tensors
        self._num_steps = num_steps
        self._copies = SideStream(model.device)
        self._sampled: dict[tuple[int, ...], _Sampled] = {}

    def latent(self, start_steps: tuple[int, ...]) -> torch.Tensor:
        """The final latent of the last rank with these start steps; (0,): the exact one."""
        return self._rank(start_steps).latent

    def frames(self, start_steps: tuple[int, ...]) -> Frames:
        """The decoded frames of `latent(start_steps)`."""
        latent = self.latent(start_steps)
        frames = self._model.decode({LATENTS: latent})
        pixels: Frames = self._copies.to_host(frames, mark(self._model.device)).numpy()
        return pixels

    def forget(self, depth: int) -> None:
        """Frees the memory of the ranks from `depth` on."""
        deeper = [start_steps for start_steps in self._sampled if len(start_steps) > depth]
        for start_steps in deeper:
            del self._sampled[start_steps]

    def _rank(self, start_steps: tuple[int, ...]) -> _Sampled:
        if start_steps not in self._sampled:
            self._sampled[start_steps] = self._sample(start_steps)
        return self._sampled[start_steps]

    def _sample(self, start_steps: tuple[int, ...]) -> _Sampled:
        *before, start = start_steps
        latent = self._tensors[LATENTS]
        received: dict[int, Evaluation] = {}
        begun_of: dict[int, int] = {}
        if before:
            draft_plan = DraftPlan(num_steps=self._num_steps, start_steps=start_steps)
            begun_of = {each.at: each.begun for each in draft_plan.corrections(len(before))}
            neighbour = self._rank(tuple(before))
            received = neighbour.states
            latent = received[before[-1]].jump(neighbour.sigmas, start)
        denoiser = self._model.denoiser(self._tensors, start)
        sampler, states = DraftSampler(denoiser, start), {}
        for step in range(start, self._num_steps):
            latent = sampler.forward(latent, step)
            states[step] = sampler.last
            if step + 1 in begun_of:
                latent = sampler.corrected(latent, received[begun_of[step + 1]], step + 1)
        return _Sampled(latent, states, denoiser.sigmas)
