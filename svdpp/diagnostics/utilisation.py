"""Achieved TFLOP/s and utilisation of ranks, and the published peaks of devices."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from svdpp.config import ModelConfig, PipelineConfig, sampling_from
from svdpp.diagnostics.run_metrics import RankRunMetrics, RunMetrics
from svdpp.driver import memory_process
from svdpp.driver.resolve import resolve_config
from svdpp.errors import SvdppError
from svdpp.launch.process_lifetime import environment_defaults
from svdpp.plan.costs import PartFlops


class DevicePeak(NamedTuple):
    """Published peak of a device in TFLOP/s, for dense matrix products.

    If a data sheet gives only the peak "with sparsity", half of it is used.
    """

    pattern: str
    """Regular expression for the whole name of the device, as NVML gives it."""
    half: float
    """Peak in fp16 and bf16 with accumulation in fp32, in TFLOP/s."""
    single: float
    """Peak in fp32, in TFLOP/s. For GPUs with TF32, this is the peak in TF32, which torch lets
    cuDNN use for fp32."""
    source: str
    """URL or title of the data sheet."""
    has_bf16: bool = True
    """Whether the tensor cores compute in bf16."""


_NVIDIA = "https://www.nvidia.com/content/dam/en-zz/Solutions/"
_A100 = f"{_NVIDIA}Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_A10 = f"{_NVIDIA}Data-Center/a10/pdf/a10-datasheet.pdf"
_A40 = "https://images.nvidia.cn/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf"
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = (
    "https://resources.nvidia.com/en-us-data-center-overview-mc/en-us-data-center-overview/"
    "hpc-datasheet-sc23-h200"
)
_L4 = "https://www.nvidia.com/en-us/data-center/l4/"
_L40S = "https://www.nvidia.com/en-us/data-center/l40s/"
_T4 = "https://www.nvidia.com/en-us/data-center/tesla-t4/"
_V100 = (
    "https://images.nvidia.com/content/technologies/volta/pdf/"
    "volta-v100-datasheet-update-us-1165301-r5.pdf"
)
_AMPERE = "NVIDIA Ampere GA102 GPU Architecture whitepaper, V2.1, appendix A"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, V2.02, appendix A"

#: Published peaks of common GPUs. For devices that are not listed, users give --peak-tflops.
PEAKS = (
    DevicePeak(r"(NVIDIA )?A100.*", half=312, single=156, source=_A100),
    DevicePeak(r"NVIDIA H100 80GB HBM3", half=1979 / 2, single=989 / 2, source=_H100),
    DevicePeak(r"NVIDIA H100 PCIe", half=1513 / 2, single=756 / 2, source=_H100),
    DevicePeak(r"NVIDIA H200", half=1979 / 2, single=989 / 2, source=_H200),
    DevicePeak(r"NVIDIA A10", half=125, single=62.5, source=_A10),
    DevicePeak(r"NVIDIA A40", half=149.7, single=74.8, source=_A40),
    DevicePeak(r"NVIDIA L4", half=242 / 2, single=120 / 2, source=_L4),
    DevicePeak(r"NVIDIA L40S", half=362, single=183, source=_L40S),
    DevicePeak(r"NVIDIA GeForce RTX 3090", half=71, single=35.6, source=_AMPERE),
    DevicePeak(r"NVIDIA GeForce RTX 4090", half=165.2, single=82.6, source=_ADA),
    DevicePeak(r"(NVIDIA |Tesla )T4", half=65, single=8.1, source=_T4, has_bf16=False),
    DevicePeak(r"Tesla V100-SXM2.*", half=125, single=15.7, source=_V100, has_bf16=False),
    DevicePeak(r"Tesla V100-PCIE.*", half=112, single=14, source=_V100, has_bf16=False),
)


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Return the published peak of a device in `dtype`, in TFLOP/s.

    Args:
        device_name: Name as NVML gives it, such as "NVIDIA H200"; empty for a CPU.
        dtype: "fp32", "fp16" or "bf16".

    Returns:
        The peak; None for a device that is not in the table or has no tensor cores for `dtype`.
    """
    for peak in PEAKS:
        if re.fullmatch(peak.pattern, device_name):
            if dtype == "fp32":
                return peak.single
            return peak.half if dtype == "fp16" or peak.has_bf16 else None
    return None


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Achieved TFLOP/s and utilisation of one rank, or the mean of all ranks."""

    tflops: float
    """Achieved TFLOP/s, computed from the FLOPs of the model's calls."""
    utilisation: float | None
    """`tflops` as a fraction of the device's peak; None if the peak is unknown."""


def speed_of_rank(
    metrics: RunMetrics, rank: RankRunMetrics, flops: PartFlops, peak: float | None
) -> Speed:
    """Return TFLOP/s and utilisation of a rank while it computes: its waits do not count.

    Args:
        metrics: Metrics of the run.
        rank: Metrics of one rank of the run.
        flops: FLOPs of the run's model for one clip.
        peak: Peak of the rank's device in TFLOP/s; None if it is unknown.
    """
    return _speed(_flops_of_rank(metrics, rank, flops), rank.compute, peak)


def speed_of_run(metrics: RunMetrics, flops: PartFlops, peaks: Iterable[float | None]) -> Speed:
    """Return mean TFLOP/s and utilisation of a run's ranks over the makespan: waits count.

    The utilisation is the model FLOPs utilisation (MFU) of Chowdhery et al., PaLM, 2022
    (arXiv:2204.02311, appendix B): FLOPs / (seconds * sum of the devices' peaks).

    Args:
        metrics: Metrics of the run.
        flops: FLOPs of the run's model for one clip.
        peaks: Peak of each rank's device in TFLOP/s; None where it is unknown.
    """
    done = sum(_flops_of_rank(metrics, rank, flops) for rank in metrics.ranks)
    known = [peak for peak in peaks if peak is not None]
    mean = sum(known) / len(known) if len(known) == metrics.world_size else None
    return _speed(done, metrics.makespan * metrics.world_size, mean)


def _flops_of_rank(metrics: RunMetrics, rank: RankRunMetrics, flops: PartFlops) -> float:
    # In a CFG pair, each rank does half of the FLOPs of a step.
    step = flops.step / metrics.cfg_parallel
    decoded = rank.decode.count * rank.decode_fraction
    return rank.encode.count * flops.encode + rank.step.count * step + decoded * flops.decode


def _speed(flops: float, seconds: float, peak: float | None) -> Speed:
    tflops = flops / seconds / 1e12 if seconds else 0.0
    return Speed(tflops=tflops, utilisation=tflops / peak if peak else None)


def peaks_of(metrics: RunMetrics, dtype: str, override: float | None) -> list[float | None]:
    """Return the peak of each rank's device in TFLOP/s; None where it is unknown.

    Args:
        metrics: Metrics of the run.
        dtype: Dtype of the run's model.
        override: Peak of every rank's device in TFLOP/s, from the user; None: use the published
            peaks.
    """
    return [override or peak_tflops(rank.device_name, dtype) for rank in metrics.ranks]


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """TFLOP/s and utilisation of a run and of each of its ranks, as far as they are known."""

    run: Speed | None = None
    """Mean over all ranks, with waits; None if the FLOPs are unknown."""
    ranks: tuple[Speed, ...] = ()
    """Speed of each rank while it computes, in order."""
    note: str = ""
    """Reason why FLOPs or peaks are unknown; empty if they are known, or the ranks are on CPUs."""

    def to_json(self) -> dict[str, Any]:
        """Return TFLOP/s and utilisation of a run and its ranks as plain values."""
        return asdict(self)


def speeds_of(metrics: RunMetrics, peak_override: float | None = None) -> Speeds:
    """Return TFLOP/s and utilisation of a finished run and of its ranks.

    This counts the FLOPs of the model's calls, which takes seconds. The model's configs must still
    be on this machine; nothing is downloaded.

    Args:
        metrics: Metrics of the run, from its manifest.
        peak_override: Peak of every rank's device in TFLOP/s, from the user; None: use the
            published peaks.
    """
    if not metrics.model or not metrics.sampling:
        return Speeds(
            note="no TFLOP/s: clips differ in their parameters, or an earlier version made them"
        )
    try:
        flops = _flops_of_model(metrics)
    # These errors are raised if the model was removed, or if the manifest was edited.
    except (SvdppError, TypeError) as error:
        return Speeds(note=f"no TFLOP/s: {error}")
    peaks = peaks_of(metrics, str(metrics.model.get("dtype")), peak_override)
    unknown = {
        rank.device_name
        for rank, peak in zip(metrics.ranks, peaks, strict=True)
        if peak is None and rank.device_name
    }
    note = ""
    if unknown:
        names = ", ".join(sorted(unknown))
        note = f"no utilisation: the peak of {names} is unknown; give it by --peak-tflops"
    return Speeds(
        run=speed_of_run(metrics, flops, peaks),
        ranks=tuple(
            speed_of_rank(metrics, rank, flops, peak)
            for rank, peak in zip(metrics.ranks, peaks, strict=True)
        ),
        note=note,
    )


def _flops_of_model(metrics: RunMetrics) -> PartFlops:
    values = dict(metrics.model)
    if str(values.get("name")).startswith("~/"):  # manifests abbreviate the home folder as ~
        values["name"] = os.path.expanduser(values["name"])
    if values.get("dummy_latent_shape"):
        values["dummy_latent_shape"] = tuple(values["dummy_latent_shape"])
    model = ModelConfig(**values, local_files_only=True)
    sampling = sampling_from(metrics.sampling)
    return count_flops(PipelineConfig(world_size=1, model=model, sampling=sampling, device="cpu"))


def count_flops(config: PipelineConfig) -> PartFlops:
    """Count the FLOPs of a clip from the model's configs. This takes seconds.

    Args:
        config: Configuration of the clip, resolved or not; its layout is not used.

    Raises:
        ModelError: The model is not on this machine, or its class rejects a config.
        RequestError: The model cannot make a clip of this size.
    """
    if config.model.is_dummy:
        from svdpp.models import dummy

        return dummy.count_flops(config.model.dummy_latent, config.sampling.num_inference_steps)
    resolved, checkpoint = resolve_config(config.single_rank(), weights="none")
    assert checkpoint is not None, "only the dummy has no checkpoint"
    with environment_defaults():
        return memory_process.count_flops(checkpoint, resolved.model, resolved.sampling)
