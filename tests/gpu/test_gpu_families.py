"""Tiny Wan and LTX-Video on a GPU: the bits of diffusers, and no more waits than diffusers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image

from svdpp.config import ClipRequest, ModelConfig, ParallelConfig, PipelineConfig
from svdpp.config.families.registry import FAMILY_SPECS
from svdpp.verification.verify import run_pipelined
from tests.gpu.inside_ranks import CountedWaits, HostWaits
from tests.gpu.machine import PHOTOS, Machine, Report
from tests.support.families.ltx import TIMESTEP
from tests.support.families.wan import T2V
from tests.support.family_case import Case
from tests.support.tiny_families import CASES, save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 6
_LTX = {"height": 64, "width": 96, "num_frames": 9}
FAMILIES = {
    "svd": CASES["svd"],
    # This case has two experts, and UniPC keeps a history between the steps.
    "wan": Case("wan", {"height": 32, "width": 32, "num_frames": 5}, changes=T2V),
    "ltx": Case("ltx", _LTX),
    # Only in this case, the generator is on the device, and its state is sent with the packet.
    "ltx from an image": Case("ltx", _LTX, image=True, changes=TIMESTEP),
}


def _request(family: Case, seed: int = 0) -> ClipRequest:
    prompt = "the sea at night" if FAMILY_SPECS[family.family].takes_prompt else None
    return ClipRequest(seed=seed, prompt=prompt, image=PHOTOS[0] if family.image else None)


def _config(family: Case, machine: Machine, folder: Path, world_size: int) -> PipelineConfig:
    save_tiny(family.family, folder, image=family.image, **family.changes)
    return PipelineConfig(
        world_size=world_size,
        model=ModelConfig(name=str(folder), dtype="fp32"),
        sampling=family.config(num_inference_steps=STEPS),
        device=machine.shared_device,
        parallel=ParallelConfig(split="alternating" if world_size > 1 else "uniform"),
    )


def _generators_go_on(device: str) -> bool:
    """Return whether a torch generator on the device continues from a state that is set."""
    generator = torch.Generator(device).manual_seed(0)
    torch.randn(4, generator=generator, device=device)
    state = generator.get_state()
    expected = torch.randn(4, generator=generator, device=device)
    other = torch.Generator(device)
    other.set_state(state)
    return torch.equal(expected, torch.randn(4, generator=other, device=device))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("wan", marks=pytest.mark.no_rehearsal),
        pytest.param("ltx", marks=pytest.mark.no_rehearsal),
        "ltx from an image",
    ],
)
def test_three_ranks_are_exact(machine: Machine, report: Report, tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    if name == "ltx from an image" and not _generators_go_on(machine.shared_device):
        pytest.skip("generators on this device do not keep their state")
    config = _config(family, machine, tmp_path / "model", 3)
    requests = [_request(family, seed) for seed in (1, 2)]
    report.prove(f"tiny {name}, 3 ranks on {machine.shared_device}", config, requests)


@pytest.mark.no_rehearsal
@pytest.mark.parametrize("name", ["svd", "wan", "ltx"])
def test_a_step_waits_for_the_device_no_more_than_diffusers(
    machine: Machine, report: Report, tmp_path: Path, name: str
) -> None:
    family, written = FAMILIES[name], tmp_path / "waits"
    config = _config(family, machine, tmp_path / "model", 1)
    fault = CountedWaits("hang", 0, 0, until=str(written))
    run_pipelined(config, [_request(family)], tmp_path, fault=fault)
    lines = [tuple(map(int, line.split())) for line in written.read_text().splitlines()]
    ours = _of_each_step([(queue, events) for _, queue, events in lines[1:]])
    theirs = _of_each_step(_diffusers_waits(family, config))[: len(ours)]
    report.add(
        f"waits for the device in each step, tiny {name}",
        diffusers=[queue for queue, _ in theirs],
        rank=[queue for queue, _ in ours],
        rank_for_the_step_before=[events for _, events in ours],
    )
    assert len(ours) == STEPS - 2
    assert all(own[0] <= other[0] for own, other in zip(ours, theirs, strict=True)), "a new wait"
    assert all(events <= 1 for _, events in ours), "more than the check of the step before"


def _of_each_step(counts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(counts)]


def _diffusers_waits(family: Case, config: PipelineConfig) -> list[tuple[int, int]]:
    """Return how often the host waited for the GPU up to the end of each of diffusers' steps."""
    pipe = getattr(diffusers, FAMILY_SPECS[family.family].pipeline(family.image)).from_pretrained(
        config.model.name
    )
    pipe.to(config.device).set_progress_bar_config(disable=True)
    waits, found = HostWaits(), list[tuple[int, int]]()

    def count(*_: Any) -> dict[str, Any]:
        found.append((waits.for_queue, waits.for_events))
        return {}

    sampling, request = config.sampling, _request(family)
    arguments: dict[str, Any] = {
        name: getattr(sampling, name)
        for name in ("num_inference_steps", "height", "width", "num_frames")
    }
    if request.prompt is None:
        arguments["image"] = Image.new("RGB", (sampling.width, sampling.height))
    else:
        arguments |= {"prompt": request.prompt, "max_sequence_length": 8}
    with waits:
        pipe(**arguments, callback_on_step_end=count, output_type="latent")
    return found
