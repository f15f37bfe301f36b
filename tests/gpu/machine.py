"""Machine for the GPU tests: real GPUs, or a rehearsal of the same code on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SamplingConfig, SvdSampling
from svdpp.diagnostics.machine import environment
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import RankError
from svdpp.launch import gpus
from svdpp.media.inputs import example_images
from svdpp.verification.verify import verify
from svdpp.worker.messages import Event, StepDone
from tests.support.shell import svdpp_here

#: Environment variable. If it is 1, the tests run on the CPU at small sizes, which shows only that
#: their code runs.
REHEARSAL = "GPU_REHEARSAL"
#: Environment variable. If it is "small", the tests use GPUs at small sizes, and measure no model
#: of full size.
SIZE = "GPU_TESTS"
PHOTOS = [str(path) for path in example_images()]


@dataclass(frozen=True)
class Machine:
    """Machine on which the GPU tests run: the GPUs, or the CPU in a rehearsal.

    Args:
        is_rehearsal: Whether the CPU takes the place of the GPUs.
        is_small: Whether clips and models are small, so that times and memory have no meaning.
    """

    num_gpus: int
    is_rehearsal: bool
    is_small: bool

    @property
    def world_size(self) -> int:
        """Number of ranks in tests with several GPUs: one for each GPU."""
        return 2 if self.is_rehearsal else self.num_gpus

    @property
    def own_device(self) -> str:
        """Value of `device` if each rank has its own device: `cuda`, or `cpu` in a rehearsal."""
        return "cpu" if self.is_rehearsal else "cuda"

    @property
    def shared_device(self) -> str:
        """Value of `device` if all ranks share one device: `cuda:0`, or `cpu` in a rehearsal."""
        return "cpu" if self.is_rehearsal else "cuda:0"

    @property
    def dtype(self) -> Any:
        return "fp32" if self.is_rehearsal else "fp16"

    @property
    def everywhere(self) -> tuple[int, str]:
        """Number of ranks and `device` of a run on all GPUs; three ranks on a single GPU."""
        is_one = self.is_rehearsal or self.num_gpus == 1
        return (3, self.shared_device) if is_one else (self.num_gpus, self.own_device)

    def all_devices(self, **changes: Any) -> PipelineConfig:
        world_size, device = self.everywhere
        return self.config(world_size, device=device, **changes)

    def config(self, world_size: int, **changes: Any) -> PipelineConfig:
        """Return a configuration of the demo model for `world_size` ranks on the shared device."""
        steps = world_size * max(2, 6 // world_size)
        chosen = {
            "model": ModelConfig(name="demo", dtype=self.dtype),
            "sampling": self.sampling(num_inference_steps=steps),
            "device": self.shared_device,
            **changes,
        }
        return PipelineConfig(world_size=world_size, **chosen)

    def full_size(self, folder: Path, **changes: Any) -> PipelineConfig:
        """Return a configuration of the checkpoint of the fixture `full_size`.

        By default each rank has its own GPU.
        """
        size = {"height": 64, "width": 64, "num_frames": 2} if self.is_small else {}
        chosen = {
            "world_size": self.world_size,
            "model": ModelConfig(name=str(folder), dtype=self.dtype),
            "sampling": SvdSampling(num_inference_steps=14, decode_chunk_size=8, **size),
            "device": self.own_device,
        }
        return PipelineConfig(**{**chosen, **changes})

    def sampling(self, **changes: Any) -> SamplingConfig:
        size, frames = (64, 2) if self.is_small else (256, 4)
        chosen = {"height": size, "width": size, "num_frames": frames, "max_guidance_scale": 1.1}
        return SvdSampling(**{**chosen, **changes})

    def requests(self, count: int) -> list[ClipRequest]:
        """Return requests with different seeds and images, at most three if sizes are small."""
        numbers = range(min(count, 3) if self.is_small else count)
        return [ClipRequest(seed=n, image=PHOTOS[n % len(PHOTOS)]) for n in numbers]

    @property
    def options(self) -> list[str]:
        """Command-line options for quick clips of the demo model on all GPUs."""
        world_size, device = self.everywhere
        size = ["--height", "64", "--width", "64", "--frames", "2"]
        return [*size, "--model", "demo", "--device", device, "--gpus", str(world_size)]

    @property
    def steps(self) -> list[str]:
        """Command-line options for two steps on each rank of a run on all GPUs."""
        return ["--steps", str(2 * self.everywhere[0])]


def find_machine() -> Machine:
    """Return the machine on which the GPU tests run, without creating a CUDA context."""
    is_rehearsal = os.environ.get(REHEARSAL) == "1"
    is_small = is_rehearsal or os.environ.get(SIZE) == "small"
    return Machine(len(gpus.visible_gpus()), is_rehearsal, is_small)


def svdpp(*arguments: str, code: int = 0) -> str:
    """Run a command of svdpp, check its exit code, and return its stdout, or stderr after an error.

    Return its stdout, or its stderr if `code` is not 0. The command runs in a new process, because
    this process may have a CUDA context. A rehearsal runs it in this process, which saves imports.
    """
    if os.environ.get(REHEARSAL) != "1":
        return python("-m", "svdpp", *arguments, code=code)
    answer = svdpp_here(*arguments)
    assert answer.code == code, answer
    return answer.err if code else answer.out


def python(*arguments: str, code: int = 0, **variables: str) -> str:
    """Run Python in a new process, check its exit code, and return stdout, or stderr on errors."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        env={**os.environ, **variables},
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == code, f"exit code {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stderr if code else done.stdout


def seconds_until_named(
    pipeline: Pipeline, requests: list[ClipRequest], number: signal.Signals, kind: type = StepDone
) -> float:
    """Signal rank 1 in a run; return how long the run takes to end with an error that names rank 1.

    The result is the number of seconds from the signal to the end of the run.
    """
    began: list[float] = []

    def strike(rank: int, event: Event) -> None:
        if rank == 1 and isinstance(event, kind) and not began:
            began.append(time.monotonic())
            os.kill(pipeline.rank_pids[1], number)

    pipeline.observe(strike)
    with pytest.raises(RankError, match="rank 1 "), pipeline:
        pipeline.run(requests)
    return time.monotonic() - began[0]


@dataclass
class Report:
    """Values that the GPU tests measure, written as JSON and as a Markdown table."""

    folder: Path
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, **values: Any) -> None:
        self.figures[name] = values
        self.write()

    def prove(self, name: str, config: PipelineConfig, requests: list[ClipRequest]) -> None:
        """Verify a run against diffusers, add the result to the report, and fail if bits differ."""
        result = verify(config, requests)
        self.add(name, bitwise=result.bitwise, checks=len(result.checks))
        assert result.bitwise, result.first_difference

    def write(self) -> None:
        """Write the values measured so far, so that an interrupted session leaves a report too."""
        found = {"schema_version": 1, "environment": environment(), "figures": self.figures}
        (self.folder / "gpu-report.json").write_text(json.dumps(found, indent=2, default=str))
        (self.folder / "gpu-report.md").write_text(self._markdown(found["environment"]))

    def _markdown(self, facts: Any) -> str:
        names = [gpu["name"] for gpu in facts["devices"]["gpus"]]
        devices = ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names)) or "no GPU"
        versions = facts["versions"]
        shown = ("torch", "diffusers", "cuda", "cudnn", "nccl", "driver")
        lines = [
            f"{devices}; " + ", ".join(f"{name} {versions[name]}" for name in shown),
            "",
            "| check | figures |",
            "|---|---|",
        ]
        lines += [
            f"| {name} | {', '.join(f'{key} {_short(value)}' for key, value in values.items())} |"
            for name, values in self.figures.items()
        ]
        return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
