"""A pair of ranks, one for each branch of the guidance: the bits of one rank, for every row."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from svdpp.errors import ModelError
from svdpp.models.base import LATENTS, Tensors
from svdpp.models.engine.call import half
from svdpp.models.engine.model import EngineModel, load_model
from svdpp.models.engine.rows import ROWS
from svdpp.plan.layout import Roles
from tests.models.range_checks import Row, assert_equal, nothing
from tests.models.test_rows import CASES, STEPS, Rows

pytestmark = pytest.mark.usefixtures("one_thread")


class Half:
    """A `Partner` in a thread; an end of two queues."""

    def __init__(self, branch: int, own: queue.Queue[Any], other: queue.Queue[Any]) -> None:
        self.branch, self._own, self._other = branch, own, other

    def exchange(self, step: int, evaluate: Callable[[], Tensors]) -> Tensors:
        self._own.put((step, {name: tensor.clone() for name, tensor in evaluate().items()}))
        theirs, tensors = self._other.get(timeout=60)
        assert theirs == step
        return tensors


def both(work: Callable[[Half], Any]) -> list[Any]:
    """What `work` returns in each of two threads that are partners; the first error of one."""
    ends: tuple[queue.Queue[Any], queue.Queue[Any]] = queue.Queue(), queue.Queue()

    errors: list[Exception] = []

    def side(branch: int) -> Any:
        try:
            return work(Half(branch, ends[branch], ends[1 - branch]))
        except Exception as error:
            errors.append(error)
            ends[branch].put((-1, {}))  # ends the other one

    with ThreadPoolExecutor(2) as pool:
        results = [*pool.map(side, (0, 1))]
    if errors:
        raise errors[0]
    return results


def pair_of(models: list[EngineModel], packet: Tensors, start: int, end: int) -> list[Tensors]:
    """What both ranks of a pair have after steps `start` to `end`."""
    return both(
        lambda partner: models[partner.branch].denoise(packet, start, end, nothing, partner)
    )


NAMES = [
    name for name, case in CASES.items() if ROWS[case.family].branches and case.config().guided
]
QUICK = next(name for name in NAMES if CASES[name].family == "wan")
MORE = (pytest.mark.long, pytest.mark.full)
FIRST = {CASES[name].family: name for name in reversed(NAMES)}.values()


def both_ranks(row: Row, **changes: Any) -> list[EngineModel]:
    """The ranks of a pair, and all roles on each."""
    experts = frozenset(range(row.checkpoint.num_experts))
    roles = Roles(encode=True, denoise=True, decode=True, experts=experts)
    sampling = replace(row.sampling, **changes)
    return [load_model(row.checkpoint, row.model, sampling, "cpu", roles) for _ in range(2)]


@pytest.mark.parametrize(
    "name",
    [
        QUICK,
        *(pytest.param(name, marks=pytest.mark.long) for name in FIRST if name != QUICK),
        *(pytest.param(name, marks=MORE) for name in NAMES if name not in FIRST),
    ],
)
def test_a_pair_gives_the_packets_of_one_rank(rows: Rows, name: str) -> None:
    row = rows(name)
    models, packet = both_ranks(row), row.encode(row.request())
    alone = models[0].denoise(packet, 0, STEPS, nothing)

    middle = pair_of(models, packet, 0, 2)
    ends = pair_of(models, middle[1], 2, STEPS)

    assert_equal(*middle)
    assert_equal(*ends)
    if row.checkpoint.row.branches == "calls":
        assert_equal(ends[0], alone)
    assert torch.allclose(ends[0][LATENTS], alone[LATENTS], atol=1e-3)
    # The shapes are known from here on, so that no rank evaluates both branches.
    assert_equal(*pair_of(models, packet, 0, 1))


def test_a_step_of_one_branch_is_refused(rows: Rows) -> None:
    row = rows(QUICK)
    unguided = both_ranks(row, guidance_scale=1.0, guidance_scale_2=None)
    with pytest.raises(ModelError, match="step 0 evaluates one branch of the guidance only"):
        pair_of(unguided, row.encode(row.request()), 0, 1)


def test_what_may_not_be_divided_is_refused() -> None:
    def denoiser(hidden_states: Any = None, **more: Any) -> None: ...

    for name, size, words in (
        ("hidden_states", 4, "a batch of 4 is not one for each branch"),
        ("mask", 2, "it is not known how to divide more"),
    ):
        with pytest.raises(ModelError, match=words):
            half(0, denoiser, (), {name: torch.ones(size, 4)})
