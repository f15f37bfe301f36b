"""A run that needs more memory than this machine has is refused before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling, WanSampling
from svdpp.driver import ranks
from svdpp.driver import resolve as memory
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import check_memory, resolve
from svdpp.errors import OutOfMemoryError
from svdpp.models.memory import estimate
from svdpp.plan.layout import Roles
from svdpp.verification import verify
from svdpp.verification.verify import run_reference
from tests.cli.shell import DEMO, PHOTO, Answer, assert_error, svdpp_here
from tests.models.tiny_families import save_tiny_wan

pytestmark = pytest.mark.long

ALL = Roles(encode=True, denoise=True, decode=True)
DENOISE = Roles(encode=False, denoise=True, decode=False)
ENCODE = Roles(encode=True, denoise=False, decode=False)


def _config(world_size: int = 2, **sampling: int) -> PipelineConfig:
    sizes = {"height": 256, "width": 256, "num_frames": 14, "num_inference_steps": 4, **sampling}
    return PipelineConfig(
        world_size=world_size, model=ModelConfig(name="demo"), sampling=SvdSampling(**sizes)
    )


@pytest.fixture
def one_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**30)
    monkeypatch.setattr(memory, "_DEMO_PIXELS", 0)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    for module in (ranks, verify):
        monkeypatch.setattr(module, "start_ranks", start)


@pytest.mark.usefixtures("one_gib")
@pytest.mark.parametrize(
    ("config", "ranks", "words"),
    [
        (_config(), (DENOISE, ALL), "2 CPU ranks need about 2.2 GiB, 1.0 GiB free"),
        (_config(1), (ALL,), "1 CPU rank needs about 1.9 GiB, 1.0 GiB free"),
        (_config(height=32, width=32, num_frames=2), (ALL,) * 16, "16 CPU"),
        # An image takes memory beside the model.
        (_config(height=32, width=32, num_frames=2), (ENCODE, ENCODE), "2 CPU"),
    ],
)
def test_ranks_that_need_more_than_is_free_are_refused(
    config: PipelineConfig, ranks: tuple[Roles, ...], words: str
) -> None:
    resolved, checkpoint = resolve(config)
    with pytest.raises(OutOfMemoryError) as caught:
        check_memory(resolved, checkpoint, ranks)
    assert words in caught.value.message
    assert "--decode-chunk-size" in caught.value.hint


@pytest.mark.parametrize(
    ("saved", "copies"),
    [
        pytest.param(torch.bfloat16, 1, id="mapped"),
        pytest.param(torch.float32, 2, id="converted by each rank"),
    ],
)
def test_ranks_share_an_expert_whose_files_have_the_dtype(
    tmp_path: Path, saved: torch.dtype, copies: int
) -> None:
    """Wan's VAE is in float32 whatever the dtype, so its files differ from the experts'."""
    folder = save_tiny_wan(tmp_path, boundary_ratio=0.875, dtype=saved, width=8)
    config, checkpoint = resolve(
        PipelineConfig(
            world_size=2,
            model=ModelConfig(name=str(folder), dtype="bf16"),
            sampling=WanSampling(num_inference_steps=4, height=32, width=32, num_frames=5),
        )
    )
    assert checkpoint is not None
    low_noise = Roles(encode=False, denoise=True, decode=False, experts=frozenset({1}))
    decoder = Roles(encode=False, denoise=False, decode=True)
    parts = estimate(checkpoint, config.model, config.sampling, device="cpu")
    for roles, part, num_copies in (
        (low_noise, parts.denoise, copies),
        (decoder, parts.decode, 1),
    ):
        assert part is not None
        one, two = (
            memory._needed_together(config, checkpoint, (roles,) * count) for count in (1, 2)
        )
        own = memory._RANK_BYTES + part.activation_bytes
        assert one == own + part.weight_bytes
        assert two == 2 * own + num_copies * part.weight_bytes


def test_ranks_hold_what_their_actions_need() -> None:
    config = _config(3, num_inference_steps=3, height=32, width=32, num_frames=2)
    first, between, last = memory.estimate_ranks(config)
    assert memory._RANK_BYTES < between < min(first, last)


@pytest.mark.usefixtures("one_gib", "no_processes")
def test_no_process_is_started(tmp_path: Path) -> None:
    request = ClipRequest(seed=0, image=PHOTO)
    with pytest.raises(OutOfMemoryError), Pipeline(_config()):
        pytest.fail("the ranks were started")
    with pytest.raises(OutOfMemoryError):
        run_reference(_config(), [request], tensor_folder=tmp_path)


@pytest.mark.usefixtures("one_gib", "no_processes")
def test_the_command_ends_with_code_4(tmp_path: Path) -> None:
    sizes = ("--height", "512", "--width", "512", "--frames", "14")
    answer = svdpp_here("run", PHOTO, *DEMO, *sizes, "--out", str(tmp_path))
    said = [line for line in answer.err.splitlines() if line.startswith(("error", "hint"))]
    ended = Answer(answer.code, answer.out, "\n".join(said))
    assert_error(ended, 4, "out of memory before the run", "GiB free", "lower")
