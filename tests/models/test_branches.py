"""A pair of ranks, one for each branch of the guidance: the bits of one rank, for every row."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from svdpp.config import LtxSampling, SamplingConfig, WanSampling
from svdpp.errors import ModelError
from svdpp.models.base import LATENTS, Tensors
from svdpp.models.engine.model import EngineModel, load_model
from svdpp.models.engine.rows import ROWS
from svdpp.plan.layout import Roles
from tests.models.range_checks import (
    assert_equal,
    model_of,
    nothing,
    photograph,
    read_folder,
    request_of,
)
from tests.models.test_rows import CASES, STEPS
from tests.models.tiny_families import save_tiny_ltx, save_tiny_wan
from tests.models.tiny_rows import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {"num_inference_steps": STEPS, "max_sequence_length": 8}
WAN = {**SMALL, "height": 32, "width": 32, "num_frames": 5}
LTX = {**SMALL, "height": 64, "width": 64, "num_frames": 9}


class Half:
    """A `Partner` in a thread; an end of two queues."""

    def __init__(self, branch: int, own: queue.Queue[Any], other: queue.Queue[Any]) -> None:
        self.branch, self._own, self._other = branch, own, other

    def exchange(self, step: int, evaluate: Callable[[], Tensors]) -> Tensors:
        self._own.put((step, {name: tensor.clone() for name, tensor in evaluate().items()}))
        theirs, tensors = self._other.get(timeout=60)
        assert theirs == step
        return tensors


def pair_of(models: list[EngineModel], packet: Tensors, start: int, end: int) -> list[Tensors]:
    """What both ranks of a pair have after steps `start` to `end`."""
    ends: tuple[queue.Queue[Any], queue.Queue[Any]] = queue.Queue(), queue.Queue()
    results: dict[int, Any] = {}

    def denoise(branch: int) -> None:
        partner = Half(branch, ends[branch], ends[1 - branch])
        try:
            results[branch] = models[branch].denoise(packet, start, end, nothing, partner)
        except Exception as error:
            results[branch] = error
            ends[branch].put((-1, {}))

    threads = [threading.Thread(target=denoise, args=(branch,)) for branch in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, Exception):
            raise result
    return [results[0], results[1]]


def wan(folder: Path) -> tuple[Any, SamplingConfig, bool]:
    return read_folder(save_tiny_wan(folder)), WanSampling(**WAN), False


def wan_image(folder: Path) -> tuple[Any, SamplingConfig, bool]:
    saved = save_tiny_wan(folder, image_to_video=True)
    return read_folder(saved), WanSampling(**WAN, from_image=True), True


def ltx(folder: Path) -> tuple[Any, SamplingConfig, bool]:
    return read_folder(save_tiny_ltx(folder)), LtxSampling(**LTX), False


def row(name: str) -> Callable[[Path], tuple[Any, SamplingConfig, bool]]:
    def save(folder: Path) -> tuple[Any, SamplingConfig, bool]:
        case = CASES[name]
        saved = save_tiny(case.family, folder, image=case.image, **case.changes)
        return read_folder(saved), case.config(), case.image

    return save


OWN = ("wan", "ltx", "svd")
PAIRED = {
    name: row(name)
    for name, case in CASES.items()
    if ROWS[case.family].branches and case.family not in OWN
}
MODELS = {"wan": wan, "wan-image": wan_image, "ltx": ltx, **PAIRED}


def loaded(checkpoint: Any, sampling: SamplingConfig) -> EngineModel:
    roles = Roles(encode=True, denoise=True, decode=True)
    return load_model(checkpoint, model_of(checkpoint), sampling, "cpu", roles)


@pytest.mark.parametrize(
    "name",
    [name if name == "wan" else pytest.param(name, marks=pytest.mark.long) for name in MODELS],
)
def test_a_pair_gives_the_packets_of_one_rank(tmp_path: Path, name: str) -> None:
    checkpoint, sampling, has_image = MODELS[name](tmp_path)
    sampling = checkpoint.resolve(sampling)
    models = [loaded(checkpoint, sampling) for _ in range(2)]
    image = models[0].prepare(photograph()) if has_image else {}
    packet = models[0].encode(image, request_of())
    alone = models[0].denoise(packet, 0, STEPS, nothing)

    middle = pair_of(models, packet, 0, 2)
    ends = pair_of(models, middle[1], 2, STEPS)

    assert_equal(*middle)
    assert_equal(*ends)
    if checkpoint.branches == "calls":
        assert_equal(ends[0], alone)
    assert torch.allclose(ends[0][LATENTS], alone[LATENTS], atol=1e-3)
    # The shapes are known from here on, so that no rank evaluates both branches.
    assert_equal(pair_of(models, packet, 0, 1)[1], pair_of(models, packet, 0, 1)[0])


def test_a_step_of_one_branch_is_refused(tmp_path: Path) -> None:
    checkpoint, sampling, _ = wan(tmp_path)
    models = [loaded(checkpoint, sampling) for _ in range(2)]
    packet = models[0].encode({}, request_of())
    unguided = [model.with_sampling(WanSampling(**WAN, guidance_scale=1.0)) for model in models]
    with pytest.raises(ModelError, match="step 0 evaluates one branch of the guidance only"):
        pair_of(unguided, packet, 0, 1)
