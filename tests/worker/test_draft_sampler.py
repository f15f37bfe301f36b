"""The draft sampler against the published method, written out in plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from svdpp.config import ClipRequest, LatentSpec
from svdpp.diagnostics.draft_sweep import DraftSimulator
from svdpp.models.base import LATENTS, Tensors
from svdpp.models.dummy import DummyModel
from svdpp.plan.draft import DraftPlan
from svdpp.worker.draft_sampler import DraftSampler, Evaluation

N = 12
SIGMAS = torch.linspace(20.0, 0.5, N + 1) ** 1.5
START = torch.tensor([3.0, -40.0, 0.25])
STARTS = [(0, 6), (0, 1), (0, 3, 5), (0, 4, 7, 9), (0, 1, 2, 3), (0, 2, 4, 8, 11)]

Derivative = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass
class Double:
    """A model and its denoiser whose derivative is a formula."""

    derivative: Derivative
    device = torch.device("cpu")
    frames_shape = (1, 1, 1, 3)

    @property
    def sigmas(self) -> torch.Tensor:
        return SIGMAS

    def forward(self, latent: torch.Tensor, step: int) -> torch.Tensor:
        return self.evaluate(latent, step)[0]

    def evaluate(self, latent: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        derivative = self.derivative(latent, step)
        return latent + derivative * (SIGMAS[step + 1] - SIGMAS[step]), derivative

    def denoiser(self, tensors: Tensors, start: int) -> Double:  # noqa: ARG002
        return self


def straight(latent: torch.Tensor, step: int) -> torch.Tensor:
    """Linear in x and predicts the same image everywhere: Euler's paths are straight."""
    image = torch.tensor([1.0, 2.0, -3.0])
    return (latent - image) / SIGMAS[step]


def linear(latent: torch.Tensor, step: int) -> torch.Tensor:
    """Linear in x with a different factor at each step: paths bend."""
    return latent * (0.02 + 0.003 * ((7 * step) % 5))


def bent(latent: torch.Tensor, step: int) -> torch.Tensor:
    """Not linear."""
    return torch.tanh(latent / 10) * (0.5 + step / N)


def by_rounds(derivative: Derivative, start_steps: tuple[int, ...]) -> list[torch.Tensor]:
    """The method in rounds, as published, in double precision: each rank's result."""

    def jump(x: torch.Tensor, f: torch.Tensor, a: int, b: int) -> torch.Tensor:
        return x + f * (sigmas[b] - sigmas[a])

    sigmas = SIGMAS.double()
    ranks = range(len(start_steps))
    place, state = list(start_steps), {0: START.double()}
    begun: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}
    for round_ in range(start_steps[-1] + N + len(start_steps)):
        at_work = [k for k in ranks if k <= round_ and place[k] < N]
        seen = {}
        for k in at_work:
            seen[k] = (place[k], state[k], derivative(state[k], place[k]))
            begun.setdefault(k, seen[k])
            if begun[k][0] == place[k]:
                begun[k] = seen[k]
        for k in at_work:
            t, x, f = seen[k]
            state[k] = jump(x, f, t, t + 1)
            if k == round_ and k + 1 < len(start_steps):
                state[k + 1] = jump(x, f, t, start_steps[k + 1])
            b, x_b, f_b = begun[k]
            if k > 0 and k - 1 in seen and seen[k - 1][0] == b:
                _, x_told, f_told = seen[k - 1]
                state[k] = state[k] - jump(x_b, f_b, b, t + 1) + jump(x_told, f_told, b, t + 1)
                begun[k] = (t + 1, x_b, f_b)
            place[k] = t + 1
    return [state[k] for k in ranks]


def _network() -> DummyModel:
    spec = LatentSpec(shape=(1, 4, 2, 8, 8), dtype="fp32", dims="BCFHW")
    return DummyModel(spec, N, torch.device("cpu"))


@pytest.mark.parametrize("start_steps", STARTS)
@pytest.mark.parametrize("derivative", [straight, linear, bent])
def test_samplers_are_the_methods(derivative: Derivative, start_steps: tuple[int, ...]) -> None:
    lab = DraftSimulator(Double(derivative), {LATENTS: START}, N)
    for rank, told in enumerate(by_rounds(derivative, start_steps)):
        ours = lab.latent(start_steps[: rank + 1])
        torch.testing.assert_close(ours.double(), told, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("start_steps", STARTS)
def test_straight_paths_make_every_rank_exact(start_steps: tuple[int, ...]) -> None:
    """On a straight path one long step equals many short ones."""
    lab = DraftSimulator(Double(straight), {LATENTS: START}, N)
    exact = lab.latent((0,))
    assert not torch.allclose(exact, torch.tensor([1.0, 2.0, -3.0]), atol=0.01)
    for rank in range(1, len(start_steps)):
        torch.testing.assert_close(lab.latent(start_steps[: rank + 1]), exact, rtol=1e-4, atol=1e-4)


def test_slower_ranks_of_a_network_come_nearer() -> None:
    model = _network()
    lab = DraftSimulator(model, model.encode({}, ClipRequest(seed=0)), N)
    start_steps = (0, 3, 5, 7)
    exact = lab.latent((0,))
    apart = [float((lab.latent(start_steps[:k]) - exact).abs().max()) for k in (4, 3, 2)]
    assert apart == sorted(apart, reverse=True)
    assert apart[0] > 10 * apart[-1] > 0


def test_the_first_rank_is_the_sampler_itself() -> None:
    """On a real network, bit for bit."""
    model = _network()
    tensors = model.encode({}, ClipRequest(seed=0))
    latent, sampler = tensors[LATENTS], model.denoiser(tensors, 0)
    for step in range(N):
        latent = sampler.forward(latent, step)
    assert torch.equal(DraftSimulator(model, tensors, N).latent((0,)), latent)


def test_a_word_of_what_the_sampler_knows_already_changes_no_bit() -> None:
    """Even for large latents, because the common part of both jumps is never added."""
    sampler = DraftSampler(Double(bent), 0)
    latent = START * 1e6
    after = sampler.forward(latent, 0)
    same = Evaluation(0, sampler.last.latent.clone(), sampler.last.derivative.clone())
    after = sampler.forward(after, 1)
    assert torch.equal(sampler.corrected(after, same, 2), after)


def test_a_word_of_another_step_is_refused() -> None:
    sampler = DraftSampler(Double(bent), 0)
    sampler.forward(START, 0)
    with pytest.raises(AssertionError, match="state of step 1, but began at 0"):
        sampler.corrected(START, Evaluation(1, START, START), 1)


def test_half_precision_stays_half() -> None:
    latent = START.half()
    jumped = Evaluation(0, latent, torch.ones(3)).jump(SIGMAS, 1)
    assert jumped.dtype is torch.float16
    expected = START.half().float() + float(SIGMAS[1] - SIGMAS[0])
    np.testing.assert_array_equal(jumped.numpy(), expected.half().numpy())


def test_what_a_lab_forgets_it_finds_again() -> None:
    lab = DraftSimulator(Double(bent), {LATENTS: START}, N)
    draft_plan = DraftPlan(num_steps=N, start_steps=(0, 3, 5))
    before = lab.latent(draft_plan.start_steps)
    lab.forget(depth=1)
    assert torch.equal(lab.latent(draft_plan.start_steps), before)
