"""Owns the published peaks of devices, by dtype: what a rank's FLOPs are compared with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


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
