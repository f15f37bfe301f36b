"""Owns trying starts of a draft in one process: what each rank of a wave would come to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from svdpp.models.base import LATENTS, Frames, Tensors, VideoModel
from svdpp.plan.draft import Wave
from svdpp.worker.draft_sampler import Evaluation, Walk


@dataclass(frozen=True)
class _Walked:
    """All that one rank came by.

    Args:
        latent: final.
        found: by step.
        sigmas: noise levels.
    """

    latent: torch.Tensor
    found: dict[int, Evaluation]
    sigmas: torch.Tensor


class DraftLab:
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
        self._walked: dict[tuple[int, ...], _Walked] = {}

    def latent(self, starts: tuple[int, ...]) -> torch.Tensor:
        """The final latent of the last rank of the wave with these starts; (0,): the exact one."""
        return self._walk(starts).latent

    def frames(self, starts: tuple[int, ...]) -> Frames:
        """The same, decoded."""
        return self._model.decode(self.latent(starts))

    def forget(self, depth: int) -> None:
        """Drops what is known of ranks from `depth` on, which fills memory."""
        for starts in [starts for starts in self._walked if len(starts) > depth]:
            del self._walked[starts]

    def _walk(self, starts: tuple[int, ...]) -> _Walked:
        if starts not in self._walked:
            self._walked[starts] = self._walk_anew(starts)
        return self._walked[starts]

    def _walk_anew(self, starts: tuple[int, ...]) -> _Walked:
        *before, start = starts
        latent = self._tensors[LATENTS]
        heard: dict[int, Evaluation] = {}
        begun_of: dict[int, int] = {}
        if before:
            wave = Wave(num_steps=self._num_steps, starts=starts)
            begun_of = {each.at: each.begun for each in wave.meetings(len(before))}
            neighbour = self._walk(tuple(before))
            heard = neighbour.found
            latent = heard[before[-1]].jump(neighbour.sigmas, start)
        denoiser = self._model.denoiser(self._tensors, start)
        walk, found = Walk(denoiser, start), {}
        for step in range(start, self._num_steps):
            latent = walk.forward(latent, step)
            found[step] = walk.last
            if step + 1 in begun_of:
                latent = walk.corrected(latent, heard[begun_of[step + 1]], step + 1)
        return _Walked(latent, found, denoiser.sigmas)
