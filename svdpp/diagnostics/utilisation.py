"""Utilisation: FLOPs over measured seconds of each rank, and published peaks of devices."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from svdpp.config import DUMMY_MODEL, Lora, ModelConfig, SamplingConfig, sampling_from
from svdpp.diagnostics.figures import RankFigures, RunFigures
from svdpp.errors import SvdppError


class PartFlops(NamedTuple):
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
        loras = tuple(Lora(**lora) for lora in figures.model.get("loras", ()))
        model = ModelConfig(**{**figures.model, "loras": loras})
        flops = _counted(model, sampling_from(figures.sampling))
    except (SvdppError, TypeError):
        return Speeds(note="no TFLOP/s: the run's model is not here any more")
    except (RuntimeError, ValueError) as error:  # of torch; the figures come after the clips
        return Speeds(note=f"no TFLOP/s: FLOPs cannot be counted: {error}")
    dtype = str(figures.model.get("dtype"))
    ranks = utilisation(figures.ranks, flops, dtype)
    return Speeds(ranks=ranks, note=why_no_mfu(figures.ranks, ranks))


def utilisation(
    ranks: Iterable[RankFigures], flops: PartFlops, dtype: str
) -> tuple[Utilisation, ...]:
    """The utilisation of each rank that has computed."""
    found = []
    for rank in ranks:
        if rank.compute:
            works = zip((rank.encode, rank.step, rank.decode), flops, strict=True)
            tflops = sum(work.count * each for work, each in works) / rank.compute / 1e12
            peak = peak_tflops(rank.device_name, dtype)
            mfu = None if peak is None else tflops / peak
            found.append(Utilisation(rank=rank.rank, tflops=tflops, mfu=mfu))
    return tuple(found)


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


#: Published peaks by the device's whole name, as NVML and CUDA give it: TFLOP/s of dense matrix
#: products on tensor cores (half of a figure "with sparsity") in fp16 and bf16, then in fp32, which
#: is TF32, because torch lets cuDNN use it. The last three have neither TF32 nor bf16.
PEAKS = {
    r"(NVIDIA )?A100.*": (312, 156),  # nvidia-a100-datasheet-us-nvidia-1758950
    r"NVIDIA H100 80GB HBM3": (989.5, 494.5),  # nvidia-tensor-core-gpu-datasheet
    r"NVIDIA H100 PCIe": (756.5, 378),
    r"NVIDIA H200": (989.5, 494.5),  # hpc-datasheet-sc23-h200
    r"NVIDIA A10": (125, 62.5),  # a10-datasheet
    r"NVIDIA A40": (149.7, 74.8),  # nvidia-a40-datasheet
    r"NVIDIA L4": (121, 60),  # www.nvidia.com/en-us/data-center/l4
    r"NVIDIA L40S": (362, 183),  # www.nvidia.com/en-us/data-center/l40s
    r"(NVIDIA |Tesla )T4": (65, 8.1),  # www.nvidia.com/en-us/data-center/tesla-t4
    r"Tesla V100-SXM2.*": (125, 15.7),  # volta-v100-datasheet-update-us-1165301-r5
    r"Tesla V100-PCIE.*": (112, 14),
}
_WITHOUT_BF16 = ("T4", "V100")


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """The device's published peak in `dtype` (fp32, fp16 or bf16), TFLOP/s; None if unknown."""
    if dtype == "bf16" and any(name in device_name for name in _WITHOUT_BF16):
        return None
    for pattern, (half, single) in PEAKS.items():
        if re.fullmatch(pattern, device_name):
            return {"fp32": single, "fp16": half, "bf16": half}.get(dtype)
    return None
