"""The facts about the machine and the libraries: plain values, no secrets."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HUB_CACHE

import svdpp
from svdpp.errors import OutputError, redact_all
from svdpp.launch import gpus
from svdpp.launch.gpus import available_bytes
from svdpp.media.video import find_ffmpeg

SCHEMA_VERSION = 1

_LIBRARIES = (
    *("torch", "diffusers", "transformers", "accelerate", "safetensors", "huggingface-hub"),
    *("numpy", "pillow", "imageio-ffmpeg"),
)

#: Shown if they are set; no other variable is ever shown.
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING"),
    *("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "PYTORCH_CUDA_ALLOC_CONF"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "MKL_CBWR"),
    *("NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"),
    *("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    *("PIPELINE_BACKEND", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "IMAGEIO_FFMPEG_EXE", "TMPDIR"),
)
_COMMAND_SECONDS = 10.0


def environment() -> dict[str, Any]:
    """Everything that a result depends on besides its request, for `svdpp env` and `env.json`.

    The user's home is shown as `~`; only variables of a fixed list are shown. A fact that is
    missing or unknown is None.
    """
    facts = {
        "schema_version": SCHEMA_VERSION,
        "versions": _versions(),
        "git": _git(),
        "host": _host(),
        "devices": _devices(),
        "ffmpeg": _ffmpeg(),
        "hub_cache": {"path": HF_HUB_CACHE},
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    redacted: dict[str, Any] = redact_all(facts)
    return redacted


def cpu_model() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str | None]:
    return {
        "svdpp": svdpp.__version__,
        "python": platform.python_version(),
        **{name: _installed(name) for name in _LIBRARIES},
        "cuda": torch.version.cuda,
        "cudnn": _dotted(torch.backends.cudnn.version()),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
        "driver": gpus.driver_version(),
    }


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _dotted(version: int | None) -> str | None:
    """cuDNN's version number with dots: 90100 is 9.1.0, and 8902 was 8.9.2."""
    if version is None:
        return None
    major, rest = divmod(version, 10_000 if version >= 10_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _git() -> dict[str, Any] | None:
    """Commit and state of the checkout that svdpp runs from; None if it is installed."""
    root = Path(svdpp.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    sha = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if sha is None:
        return None
    return {"sha": sha, "dirty": bool(_output("git", "-C", str(root), "status", "--porcelain"))}


def _host() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "available_bytes": available_bytes(),
        "argv": sys.argv,
    }


def _devices() -> dict[str, Any]:
    """The GPUs, and their peer access (the row's GPU reads the column's memory)."""
    return {
        "gpus": [
            {"name": gpu.name, "memory_bytes": gpu.total_bytes, "capability": gpu.capability}
            for gpu in gpus.visible_gpus()
        ],
        "peer_access": gpus.peer_access(),
    }


def _ffmpeg() -> dict[str, Any] | None:
    try:
        path = find_ffmpeg()
    except OutputError:
        return None
    words = (_output(path, "-version") or "").split()
    return {"path": path, "version": words[2] if words[:2] == ["ffmpeg", "version"] else None}


def _output(*command: str) -> str | None:
    """The output of a command, stripped; None if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
