"""The arithmetic of one rank in a draft: its steps, its long first step, its corrections.

The formulas are those of CHORDS (arXiv:2507.15260). A long Euler step from step a to step b is
`jump(x, f, a, b) = x + f * (sigma_b - sigma_a)`. A rank that last began at step b with latent x_b
and derivative f_b receives a better state (x', f') of step b. Its latent at step t becomes
`x_t - jump(x_b, f_b, b, t) + jump(x', f', b, t)`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from svdpp.models.base import Denoiser


class Evaluation(NamedTuple):
    """The state before a step: latent and derivative."""

    step: int
    """Number of steps done."""
    latent: torch.Tensor
    """In the model's dtype."""
    derivative: torch.Tensor
    """dx/dsigma at the latent, float32."""

    def jump(self, sigmas: torch.Tensor, end: int) -> torch.Tensor:
        """The latent at step `end` after one long Euler step from this state."""
        return _moved(self.latent, self.derivative * (sigmas[end] - sigmas[self.step]))


class DraftSampler:
    """Keeps the states that a draft needs; its steps give the same bits as the denoiser's.

    Args:
        denoiser: of this clip, created for `start`.
        start: the first step.
    """

    def __init__(self, denoiser: Denoiser, start: int) -> None:
        self._denoiser = denoiser
        self._began_at = start
        self._began: Evaluation | None = None
        self._last: Evaluation | None = None

    @property
    def last(self) -> Evaluation:
        """The state before the last step done."""
        assert self._last is not None, "no step has been done yet"
        return self._last

    def forward(self, latent: torch.Tensor, step: int) -> torch.Tensor:
        """See `Denoiser`."""
        after, derivative = self._denoiser.evaluate(latent, step)
        self._last = Evaluation(step, latent, derivative)
        if step == self._began_at:
            self._began = self._last
        return after

    def long_step(self, start: int, end: int) -> torch.Tensor:
        """The latent at step `end` after one long step from `start`, which was done last."""
        last = self.last
        assert last.step == start, f"step {start} asked for, {last.step} was done last"
        return last.jump(self._denoiser.sigmas, end)

    def corrected(self, latent: torch.Tensor, state: Evaluation, at: int) -> torch.Tensor:
        """`latent`, before step `at`, corrected as if this rank had begun from `state`.

        The next correction is relative to step `at`.
        """
        began = self._began
        assert began is not None, "no step has been done yet"
        assert began.step == state.step, f"state of step {state.step}, but began at {began.step}"
        # The difference of the two jumps, in one expression: computed apart, their common part (at
        # sigma 700) would cancel most digits of it.
        latents = state.latent.float() - began.latent.float()
        derivatives = state.derivative - began.derivative
        self._began_at, self._began = at, None
        sigmas = self._denoiser.sigmas
        return _moved(latent, latents + derivatives * (sigmas[at] - sigmas[state.step]))


def _moved(latent: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return (latent.float() + by).to(latent.dtype)
