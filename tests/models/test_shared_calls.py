"""Denoiser calls of a block that two ranks share; each rank runs the block twice."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from svdpp.errors import ModelError
from svdpp.models.engine.records import Node
from svdpp.models.engine.shared_calls import SharedCalls
from tests.support.partners import Half, run_pair

CPU = torch.device("cpu")
LATENT = torch.tensor([[1.0, 2.0], [3.0, torch.nan]])

#: Block of a pipeline: a function that calls a denoiser and combines the results.
Block = Callable[[Callable[..., Any], torch.Tensor], Any]


class Rank:
    """Stand-in for a rank of a CFG pair, with a list of the denoiser calls that it evaluated."""

    def __init__(self) -> None:
        self.outputs: list[Node] = []
        self.evaluated: list[float] = []
        self.resets = 0

    def forward(self, latent: torch.Tensor, scale: float) -> Any:
        self.evaluated.append(scale)
        return {"noise": latent * scale, "audio": [latent.T.sum(1) + scale]}

    def step(self, partner: Half, block: Block) -> Any:
        shared = SharedCalls(partner, CPU, self.outputs)

        def call(latent: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return shared.evaluate(5, self.forward, (latent, *args), kwargs)

        def set_back() -> None:
            self.resets += 1

        return shared.run(5, lambda: block(call, LATENT), set_back)


def run_in_pair(ranks: list[Rank], block: Block) -> list[Any]:
    """Run a block on both ranks of a CFG pair, and return both results."""
    return run_pair(lambda partner: ranks[partner.branch].step(partner, block))


def guided_block(*scales: float) -> Block:
    """Return a stand-in for a guided block, which sums the denoiser's results for all scales."""

    def block(call: Callable[..., Any], latent: torch.Tensor) -> Any:
        results = [call(latent + 0, scale=scale) for scale in scales]
        for result in results:
            result["noise"].mul_(2)  # blocks may change results in place
        return sum(result["noise"] for result in results), results[-1]["audio"][0]

    return block


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_each_rank_evaluates_every_second_call(count: int) -> None:
    scales = [float(scale) for scale in range(1, count + 1)]
    ranks, block = [Rank(), Rank()], guided_block(*(scales or [9.0]))
    if count == 0:
        block = lambda _, latent: (latent, latent)  # noqa: E731
    alone = block(Rank().forward, LATENT)
    for is_later in (False, True):
        for rank in ranks:
            rank.evaluated.clear()
        for noise, audio in run_in_pair(ranks, block):
            assert torch.equal(noise.view(torch.int32), alone[0].view(torch.int32))
            assert torch.equal(audio.view(torch.int32), alone[1].view(torch.int32))
        own = [scales[0::2], scales[1::2]]
        if not is_later:  # an extra call tells the second rank the results' shapes
            own[1] = scales[:1] + own[1]
        assert [rank.evaluated for rank in ranks] == own
    assert [rank.resets for rank in ranks] == [2 * bool(count)] * 2


def _chained(call: Callable[..., Any], latent: torch.Tensor) -> Any:
    return call(call(latent, scale=1.0)["noise"], scale=2.0)["noise"]


def _changed_in_place(call: Callable[..., Any], latent: torch.Tensor) -> Any:
    shared = latent.clone()
    first = call(shared, scale=1.0)["noise"]
    return call(shared.add_(first), scale=1.0)["noise"]


def _of_another_scale(call: Callable[..., Any], latent: torch.Tensor) -> Any:
    return call(latent, scale=float(call(latent, scale=1.0)["noise"][0, 0]))["noise"]


def _stopped(call: Callable[..., Any], latent: torch.Tensor) -> Any:
    return call(latent, 2.0)["noise"] if call(latent, 1.0)["noise"][0, 0] > 0 else latent


def _of_an_object(call: Callable[..., Any], latent: torch.Tensor) -> Any:
    call(latent, 1.0)
    return call(latent, scale=SimpleNamespace(value=1.0))


@pytest.mark.parametrize(
    "block", [_chained, _changed_in_place, _of_another_scale, _stopped, _of_an_object]
)
def test_a_call_that_depends_on_another_is_refused(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [Rank(), Rank()]
    monkeypatch.setattr(Rank, "forward", _forward_of_any_scale)
    if block not in (_changed_in_place, _of_an_object):
        run_in_pair(ranks, block)  # in its first step, the second rank evaluates the call itself
    with pytest.raises(ModelError, match="of the denoiser in step 5 depends on the") as caught:
        run_in_pair(ranks, block)
    assert caught.value.details["step"] == 5


def _forward_of_any_scale(_: Rank, latent: torch.Tensor, scale: Any) -> Any:
    return {"noise": latent * getattr(scale, "value", scale)}


def test_results_of_different_shapes_are_refused() -> None:
    def block(call: Callable[..., Any], latent: torch.Tensor) -> Any:
        return call(latent, scale=1.0), call(latent[:1], scale=1.0)

    with pytest.raises(ModelError, match="results of different shapes in step 5"):
        run_in_pair([Rank(), Rank()], block)
