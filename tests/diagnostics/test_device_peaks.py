"""The table of published peaks."""

from __future__ import annotations

import pytest

from svdpp.diagnostics.utilisation import peak_tflops


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "fp32", 156.0),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("Tesla T4", "bf16", None),
        ("Tesla T4", "fp32", 8.1),
        # Other cards whose names begin alike.
        ("NVIDIA H200 NVL", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA L40", "bf16", None),
        ("", "fp32", None),
    ],
)
def test_peaks(name: str, dtype: str, peak: float | None) -> None:
    assert peak_tflops(name, dtype) == peak
