"""Utilisation: FLOPs over measured seconds of each rank, and published peaks of devices."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from svdpp.config import DUMMY_MODEL, ModelConfig, SamplingConfig, sampling_from
from svdpp.diagnostics.figures import RankFigures, RunFigures
from svdpp.errors import SvdppError


@dataclass(frozen=True, kw_only=True)
class PartFlops:
    """FLOPs of one clip's encode, of one step, and of one clip's decode."""

    encode: int
    step: int
    decode: int


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """How fast one rank computed."""

    rank: int
    tflops: float
    """Achieved TFLOP/s while it computed; waits do not count."""
    mfu: float | None
    """Of its device's published peak, 0 to 1 (model FLOPs utilisation); None if that is unknown."""

    def __str__(self) -> str:
        return f"rank {self.rank} {speed_text(self.tflops, self.mfu)}"


def utilisation(ranks: Iterable[RankFigures], flops: PartFlops, dtype: str) -> list[Utilisation]:
    """The utilisation of each rank that has computed."""
    return [_of_rank(rank, flops, dtype) for rank in ranks if rank.compute]


def _of_rank(rank: RankFigures, flops: PartFlops, dtype: str) -> Utilisation:
    done = (
        rank.encode.count * flops.encode
        + rank.step.count * flops.step
        + rank.decode.count * flops.decode
    )
    return achieved(rank.rank, done, rank.compute, rank.device_name, dtype)


def achieved(rank: int, flops: int, seconds: float, device_name: str, dtype: str) -> Utilisation:
    """The utilisation of a rank that computed `flops` in `seconds`, above 0."""
    tflops = flops / seconds / 1e12
    peak = peak_tflops(device_name, dtype)
    return Utilisation(rank=rank, tflops=tflops, mfu=None if peak is None else tflops / peak)


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """The utilisation of a run's ranks."""

    ranks: tuple[Utilisation, ...] = ()
    note: str = ""
    """Why there is none, or no MFU; empty if there is."""

    def __str__(self) -> str:
        speeds = ", ".join(map(str, self.ranks))
        line = f"TFLOP/s while computing (MFU): {speeds}" if speeds else ""
        return "; ".join(filter(None, [line, self.note]))


def speed_text(tflops: float, mfu: float | None) -> str:
    """Such as `412 (42%)`; without the share if MFU is unknown."""
    return f"{tflops:.3g}" if mfu is None else f"{tflops:.3g} ({mfu:.0%})"


def speeds_of(figures: RunFigures | None) -> Speeds:
    """The utilisation of a run's ranks; takes seconds to build the model without weights.

    The dummy model has none.
    """
    if figures is None or not figures.model or figures.model.get("name") == DUMMY_MODEL:
        return Speeds()
    try:
        flops = _counted(ModelConfig(**figures.model), sampling_from(figures.sampling))
    except (SvdppError, TypeError):
        return Speeds(note="no TFLOP/s: the run's model is not here any more")
    except (RuntimeError, ValueError) as error:  # of torch; the figures come after the clips
        return Speeds(note=f"no TFLOP/s: FLOPs cannot be counted: {error}")
    found = tuple(utilisation(figures.ranks, flops, str(figures.model.get("dtype"))))
    return Speeds(ranks=found, note=why_no_mfu(figures.ranks, found))


def why_no_mfu(ranks: Iterable[RankFigures], found: Iterable[Utilisation]) -> str:
    """Which devices have no published peak here; empty if all have one."""
    unknown = {each.rank for each in found if each.mfu is None}
    names = {rank.device_name or rank.device for rank in ranks if rank.rank in unknown}
    return f"no MFU: no published peak is known for {', '.join(sorted(names))}" if names else ""


def count_flops(model: ModelConfig, sampling: SamplingConfig) -> PartFlops:
    """The FLOPs of a model's parts, from its configs and without its weights; takes seconds."""
    from svdpp.models.checkpoint import find_checkpoint

    checkpoint = find_checkpoint(model, weights=False)
    from svdpp.models.memory import estimate  # imports diffusers: seconds

    parts = estimate(checkpoint, model, sampling, device="cpu")
    assert parts.encode is not None
    assert parts.decode is not None
    return PartFlops(encode=parts.encode.flops, step=parts.denoise.flops, decode=parts.decode.flops)


# The rounds of a bench all have the same model and sampling.
_counted = functools.lru_cache(8)(count_flops)


@dataclass(frozen=True, kw_only=True)
class DevicePeak:
    """Peak TFLOP/s of dense matrix products on tensor cores; half of a figure "with sparsity"."""

    pattern: str
    """Of the device's whole name, as NVML and CUDA give it."""
    half: float
    """In fp16 and bf16."""
    single: float
    """In fp32: as TF32, which torch lets cuDNN use; on devices without TF32, of the plain cores."""
    has_bf16: bool = True
    source: str


_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = (
    "https://resources.nvidia.com/en-us-data-center-overview-mc/en-us-data-center-overview/"
    "hpc-datasheet-sc23-h200"
)
_A10 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf"
_A40 = "https://images.nvidia.cn/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf"
_L4 = "https://www.nvidia.com/en-us/data-center/l4/"
_L40S = "https://www.nvidia.com/en-us/data-center/l40s/"
_T4 = "https://www.nvidia.com/en-us/data-center/tesla-t4/"
_V100 = (
    "https://images.nvidia.com/content/technologies/volta/pdf/"
    "volta-v100-datasheet-update-us-1165301-r5.pdf"
)

PEAKS = (
    DevicePeak(pattern=r"(NVIDIA )?A100.*", half=312, single=156, source=_A100),
    DevicePeak(pattern=r"NVIDIA H100 80GB HBM3", half=1979 / 2, single=989 / 2, source=_H100),
    DevicePeak(pattern=r"NVIDIA H100 PCIe", half=1513 / 2, single=756 / 2, source=_H100),
    DevicePeak(pattern=r"NVIDIA H200", half=1979 / 2, single=989 / 2, source=_H200),
    DevicePeak(pattern=r"NVIDIA A10", half=125, single=62.5, source=_A10),
    DevicePeak(pattern=r"NVIDIA A40", half=149.7, single=74.8, source=_A40),
    DevicePeak(pattern=r"NVIDIA L4", half=242 / 2, single=120 / 2, source=_L4),
    DevicePeak(pattern=r"NVIDIA L40S", half=362, single=183, source=_L40S),
    DevicePeak(pattern=r"(NVIDIA |Tesla )T4", half=65, single=8.1, has_bf16=False, source=_T4),
    DevicePeak(pattern=r"Tesla V100-SXM2.*", half=125, single=15.7, has_bf16=False, source=_V100),
    DevicePeak(pattern=r"Tesla V100-PCIE.*", half=112, single=14, has_bf16=False, source=_V100),
)


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """The device's published peak in `dtype` (fp32, fp16 or bf16), TFLOP/s; None if unknown."""
    for peak in PEAKS:
        if re.fullmatch(peak.pattern, device_name):
            by_dtype: Mapping[str, float] = {
                "fp32": peak.single,
                "fp16": peak.half,
                **({"bf16": peak.half} if peak.has_bf16 else {}),
            }
            return by_dtype.get(dtype)
    return None
