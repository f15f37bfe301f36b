"""Owns the simulation of drafts in one process: each rank's result for many start steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from svdpp.comm.streams import SideStream, mark
from svdpp.models.base import LATENTS, DraftableModel, Frames, Tensors
from svdpp.plan.draft import DraftPlan
from svdpp.worker.draft_sampler import DraftSampler, Evaluation


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
