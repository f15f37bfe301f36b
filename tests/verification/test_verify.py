"""The proof by real processes: equal without a fault, and every injected fault is located."""

from __future__ import annotations

import socket
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling
from svdpp.media.inputs import example_photos
from svdpp.models.dummy import DummyModel
from svdpp.verification.verify import Check, run_pipelined, verify
from tests.faults.damage import Damage
from tests.models.builders import save_tiny_checkpoint

pytestmark = pytest.mark.processes

DUMMY = PipelineConfig(
    world_size=2,
    model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8)),
    sampling=SvdSampling(num_inference_steps=6),
)


def _places(checks: tuple[Check, ...]) -> list[tuple[int, str, int, int]]:
    return [(check.clip, check.what, check.step, check.rank) for check in checks]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PipelineConfig:
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", vae_factor=4)
    return PipelineConfig(
        world_size=2,
        model=ModelConfig(name=str(folder)),
        sampling=SvdSampling(num_inference_steps=4, height=64, width=64, num_frames=3),
    )


def _requests(num_clips: int) -> list[ClipRequest]:
    photos = example_photos()
    return [
        ClipRequest(seed=clip, image=str(photos[clip % len(photos)])) for clip in range(num_clips)
    ]


@pytest.mark.parametrize(("world_size", "dtype"), [(1, "fp32"), (2, "fp32"), (4, "bf16")])
def test_svd_through_ranks_is_bitwise_diffusers(
    tiny: PipelineConfig, world_size: int, dtype: str
) -> None:
    model = replace(tiny.model, dtype=dtype)  # type: ignore[arg-type]
    verdict = verify(replace(tiny, world_size=world_size, model=model), _requests(3))
    assert verdict.bitwise
    assert verdict.equal
    count = 4 // world_size
    expected = []
    for clip in range(3):
        for rank in range(world_size):
            step = (rank + 1) * count
            what = "final_latent" if step == 4 else "latent"
            expected.append((clip, what, step, rank))
        expected.append((clip, "frames", 4, world_size - 1))
    assert _places(verdict.checks) == expected
    hashes = [check.sha256 for check in verdict.checks]
    assert len(set(hashes)) == len(hashes), "clips and steps must not be the same thing twice"


def test_the_dummy_is_the_plain_loop() -> None:
    verdict = verify(replace(DUMMY, world_size=3), [ClipRequest(seed=s) for s in (4, 5)])
    assert verdict.bitwise
    assert len(verdict.checks) == 2 * 3


def test_a_launched_rank_0_frees_its_memory_before_the_reference_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its process goes on, and would keep its model and the allocator's cache on the device."""
    models: list[weakref.ref[DummyModel]] = []
    emptied: list[bool] = []

    def load_model(*_: Any) -> DummyModel:
        model = DummyModel(DUMMY.model.dummy_latent, 6, torch.device("cpu"))
        models.append(weakref.ref(model))
        return model

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (launcher | {"MASTER_PORT": port}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("svdpp.worker.device.apply_settings", lambda **_: None)  # of this process
    monkeypatch.setattr("svdpp.worker.rank.load_model", load_model)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(models[0]() is None))
    run_pipelined(replace(DUMMY, world_size=1), [ClipRequest(seed=0)], tmp_path)
    assert emptied == [True]


@pytest.mark.parametrize("kind", ["ulp", "skip"])
def test_a_planted_fault_is_caught_where_it_was_planted(kind: str) -> None:
    config = replace(DUMMY, world_size=3)
    requests = [ClipRequest(seed=seed) for seed in range(3)]
    fault = Damage(kind, 1, 1)
    verdict = verify(config, requests, fault=fault)
    assert not verdict.equal
    first = verdict.first_difference
    assert first is not None
    assert (first.clip, first.step, first.rank) == (1, 4, 1)
    if kind == "ulp":
        assert first.max_ulp == 1
        assert first.first_index == (0, 2, 0, 0, 0)
    # Everything of this clip after the fault differs, and nothing else.
    assert [check.equal for check in verdict.checks] == [
        *(True, True, True),
        *(True, False, False),
        *(True, True, True),
    ]
    assert verify(config, requests, fault=fault, tolerance=10.0).equal


def test_a_fault_in_svd_reaches_the_frames_check(tiny: PipelineConfig) -> None:
    verdict = verify(tiny, _requests(1), fault=Damage("skip", 0, 0))
    assert [check.what for check in verdict.checks if not check.equal] == [
        "latent",
        "final_latent",
        "frames",
    ]
