"""Owns one rank's walk along one clip's steps in a draft: long steps ahead, and their mending.

The formulas are those of CHORDS (arXiv:2507.15260): `jump(x, f, a, b) = x + f * (sigma_b -
sigma_a)`, and after a word (x', f') on the step b at which this walk last began, from x_b with f_b,
the latent at step t becomes `x_t - jump(x_b, f_b, b, t) + jump(x', f', b, t)`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from svdpp.models.base import Denoiser


class Evaluation(NamedTuple):
    """Where a walk was, and which way it went from there."""

    step: int
    """Steps done before."""
    latent: torch.Tensor
    """Before the step, in the model's dtype."""
    derivative: torch.Tensor
    """dx/dsigma there, float32."""

    def jump(self, sigmas: torch.Tensor, end: int) -> torch.Tensor:
        """The latent at step `end` that one long step from here reaches."""
        return _moved(self.latent, self.derivative * (sigmas[end] - sigmas[self.step]))


class Walk:
    """A denoiser that remembers what a draft needs; its steps are the denoiser's own, bit for bit.

    Args:
        denoiser: of this clip, made for `start`.
        start: the first step.
    """

    def __init__(self, denoiser: Denoiser, start: int) -> None:
        self._denoiser = denoiser
        self._began_at = start
        self._began: Evaluation | None = None
        self._last: Evaluation | None = None

    @property
    def last(self) -> Evaluation:
        """The last step done."""
        assert self._last is not None, "no step has been done yet"
        return self._last

    def forward(self, latent: torch.Tensor, step: int) -> torch.Tensor:
        """See `Denoiser`."""
        after, derivative = self._denoiser.evaluate(latent, step)
        self._last = Evaluation(step, latent, derivative)
        if step == self._began_at:
            self._began = self._last
        return after

    def leap(self, start: int, end: int) -> torch.Tensor:
        """The latent at step `end` that one long step from `start`, the last one done, reaches."""
        last = self.last
        assert last.step == start, f"step {start} asked for, {last.step} was done last"
        return last.jump(self._denoiser.sigmas, end)

    def corrected(self, latent: torch.Tensor, word: Evaluation, at: int) -> torch.Tensor:
        """`latent`, before step `at`, as it would be had this walk begun where `word` was.

        The walk counts as begun anew at step `at`.
        """
        began = self._began
        assert began is not None, "no step has been done yet"
        assert began.step == word.step, f"word of step {word.step}, the walk began at {began.step}"
        # The two jumps in one: what they have in common, at sigma 700, would drown the difference.
        moved = word.latent.float() - began.latent.float()
        turned = word.derivative - began.derivative
        self._began_at, self._began = at, None
        sigmas = self._denoiser.sigmas
        return _moved(latent, moved + turned * (sigmas[at] - sigmas[word.step]))


def _moved(latent: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return (latent.float() + by).to(latent.dtype)
