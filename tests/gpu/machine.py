"""What the GPU tests run on: a real GPU, or a rehearsal of the same code on the CPU."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from svdpp.config import ModelConfig, PipelineConfig, SamplingConfig, SvdSampling
from svdpp.diagnostics.environment import environment
from svdpp.launch import gpus

#: Set to 1, the tests run on the CPU with small models: that they run at all, and no more.
REHEARSAL = "GPU_REHEARSAL"


@dataclass(frozen=True)
class Machine:
    """Where the tests run.

    Args:
        num_gpus: GPUs that this process may use.
        is_rehearsal: whether the CPU stands in for one.
    """

    num_gpus: int
    is_rehearsal: bool

    @property
    def world_size(self) -> int:
        """Ranks in the tests of several GPUs: one for each."""
        return 2 if self.is_rehearsal else self.num_gpus

    @property
    def own(self) -> str:
        """The device of ranks that have one each."""
        return "cpu" if self.is_rehearsal else "cuda"

    @property
    def shared(self) -> str:
        """The one device that several ranks share."""
        return "cpu" if self.is_rehearsal else "cuda:0"

    @property
    def dtype(self) -> Any:
        """The precision of a run on this machine."""
        return "fp32" if self.is_rehearsal else "fp16"

    def config(self, world_size: int, **changes: Any) -> PipelineConfig:
        """A run of the demo model by `world_size` ranks on the shared device."""
        chosen = {
            "model": ModelConfig(name="demo", dtype=self.dtype),
            "sampling": self.sampling(num_inference_steps=6),
            "device": self.shared,
            **changes,
        }
        return PipelineConfig(world_size=world_size, **chosen)

    def sampling(self, **changes: Any) -> SamplingConfig:
        """Small clips for the demo model."""
        size = 64 if self.is_rehearsal else 256
        chosen = {"height": size, "width": size, "num_frames": 4, "max_guidance_scale": 1.1}
        return SvdSampling(**{**chosen, **changes})


def find_machine() -> Machine:
    """This machine, without touching CUDA."""
    return Machine(len(gpus.visible_gpus()), os.environ.get(REHEARSAL) == "1")


@dataclass
class Report:
    """Figures of the tests, written as `gpu-report.json` and as a Markdown table.

    Args:
        folder: where both files go.
    """

    folder: Path
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, **values: Any) -> None:
        """Adds the figures of one test."""
        self.figures[name] = values
        self.write()

    def write(self) -> None:
        """Writes what there is so far: a run that is cut off leaves its figures."""
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


def free_cuda() -> None:
    """Gives back what a test in this process has left on the GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
