"""Owns trying starts of a draft in one process: what each rank of a wave would come to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from svdpp.models.base import LATENTS, Frames, Tensors, VideoModel
from svdpp.plan.draft import DraftPlan
from svdpp.worker.draft_sampler import DraftSampler, Evaluation


@dataclass(frozen=True)
class _Sampled:
    """All that one rank came by.

    Args:
        latent: final.
        found: by step.
        sigmas: noise levels.
    """

    latent: torch.Tensor
    found: dict[int, Evaluation]
    sigmas: torch.Tensor


class DraftSimulator:
    """Walks the ranks of many waves over one clip, each rank once for all waves that begin alike.

    What a rank does follows from its own start and those before it, so waves are kept as a tree.

    Args:
        model: with all its parts.
        tensors: of the clip, as `encode` made them.
        num_steps: N.
    """

    def __init__(
        self,
        model: VideoModel,
        tensors: Tensors,
        num_steps: int,
    ) -> None:
        self._model = model
        self._tensors = tensors
        self._num_steps = num_steps
        self._walked: dict[tuple[int, ...], _Sampled] = {}

    def latent(self, start_steps: tuple[int, ...]) -> torch.Tensor:
        """The final latent of the last rank of the wave with these starts; (0,): the exact one."""
        return self._walk(start_steps).latent

    def frames(self, start_steps: tuple[int, ...]) -> Frames:
        """The same, decoded."""
        return self._model.decode(self.latent(start_steps))

    def forget(self, depth: int) -> None:
        """Drops what is known of ranks from `depth` on, which fills memory."""
        for start_steps in [
            start_steps for start_steps in self._walked if len(start_steps) > depth
        ]:
            del self._walked[start_steps]

    def _walk(self, start_steps: tuple[int, ...]) -> _Sampled:
        if start_steps not in self._walked:
            self._walked[start_steps] = self._walk_anew(start_steps)
        return self._walked[start_steps]

    def _walk_anew(self, start_steps: tuple[int, ...]) -> _Sampled:
        *before, start = start_steps
        latent = self._tensors[LATENTS]
        heard: dict[int, Evaluation] = {}
        begun_of: dict[int, int] = {}
        if before:
            draft_plan = DraftPlan(num_steps=self._num_steps, start_steps=start_steps)
            begun_of = {each.at: each.begun for each in draft_plan.corrections(len(before))}
            neighbour = self._walk(tuple(before))
            heard = neighbour.found
            latent = heard[before[-1]].jump(neighbour.sigmas, start)
        denoiser = self._model.denoiser(self._tensors, start)
        walk, found = DraftSampler(denoiser, start), {}
        for step in range(start, self._num_steps):
            latent = walk.forward(latent, step)
            found[step] = walk.last
            if step + 1 in begun_of:
                latent = walk.corrected(latent, heard[begun_of[step + 1]], step + 1)
        return _Sampled(latent, found, denoiser.sigmas)
