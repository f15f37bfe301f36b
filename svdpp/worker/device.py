"""A rank's device: the settings that its bits depend on, its memory, and the profile of a clip."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

from svdpp.comm import streams
from svdpp.config import PipelineConfig
from svdpp.errors import (
    OutOfMemoryError,
    RequestError,
    SvdppError,
    first_line,
    is_out_of_memory,
    memory_details,
)
from svdpp.launch import gpus, process_group
from svdpp.launch.world import World
from svdpp.media import output_files
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.actions import Action, Kind


def take_device(config: PipelineConfig, world: World) -> torch.device:
    """Choose this rank's device, make it the thread's current one, and apply the settings.

    Args:
        config: Configuration; its device is `cpu`, `cuda` (a GPU for each rank) or `cuda:N`.
        world: World of the rank, with its place on its host.

    Raises:
        RequestError: The device does not exist, or cannot be used.
        OutOfMemoryError: The device has no memory for a CUDA context.
    """
    name = process_group.device_of_rank(config.device, world)
    device = torch.device(name)
    try:
        with out_of_memory_named(None, device, world.rank):
            streams.use_device(device)
    except OutOfMemoryError:  # also a RuntimeError
        raise
    except (AssertionError, RuntimeError) as error:
        raise RequestError(
            f"{name} cannot be used: {first_line(error)}",
            "svdpp doctor shows which devices work",
            details={"device": name, "rank": world.rank, "cause": first_line(error)},
        ) from error
    apply_settings(num_threads=config.num_threads, device=name, deterministic=config.deterministic)
    return device


def conditions_of(
    config: PipelineConfig, checkpoint: Checkpoint | None, device: str
) -> dict[str, Any]:
    """Return the conditions that a rank's bits depend on, which every hash is recorded with.

    Args:
        config: Configuration of the pipeline.
        checkpoint: Checkpoint of the model; None for the dummy.
        device: Name of the device that the rank has taken.

    Returns:
        JSON values by name: settings of torch, and of a GPU its model and library versions.
    """
    conditions: dict[str, Any] = {
        "memory_format": "channels_last" if config.model.channels_last else "contiguous",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if device.startswith("cuda"):
        conditions |= _gpu_conditions(device)
    part = "feature_extractor"  # of SVD, whose class is that of the installed library
    if checkpoint is not None and (name := dict(checkpoint.classes).get(part)):
        from svdpp.models.engine.load import component_class  # imports diffusers: seconds

        conditions[part] = component_class(part, name).__name__
    return conditions


def gpu_uuid(device: str) -> str | None:
    """Return the UUID of this rank's GPU, as torch writes it; None on the CPU."""
    if not device.startswith("cuda"):
        return None
    return str(torch.cuda.get_device_properties(torch.device(device)).uuid)


def device_name(device: str) -> str:
    """Return the name of this rank's GPU, such as "NVIDIA H200"; empty on the CPU."""
    if not device.startswith("cuda"):
        return ""
    return str(torch.cuda.get_device_properties(torch.device(device)).name)


# Retried and failed allocations of each device before the first `MemoryPressure` of this process.
_events_before: dict[torch.device, int] = {}


class MemoryPressure:
    """Whether the CUDA allocator of this process has run short of memory.

    cuDNN then silently falls back to a kernel with a smaller workspace, and the bits change. It
    keeps that choice for all later calls of the same shape, so the state is one of the process: all
    clips after the first shortage may differ, not only the one during which it happened, and also
    those of a later pipeline in the same process.

    Args:
        device: Device of the rank, after its model is loaded; on the CPU nothing falls back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = _events_before.setdefault(device, self._events())

    def has_occurred(self) -> bool:
        """Whether an allocation of this process was retried or failed, now or for a clip before."""
        return self._events() > self._before

    def _events(self) -> int:
        stats = torch.cuda.memory_stats(self._device) if self._device.type == "cuda" else {}
        return int(stats.get("num_alloc_retries", 0)) + int(stats.get("num_ooms", 0))


def peak_bytes(device: str) -> tuple[int | None, int]:
    """Return the peak of this process on a device, in bytes.

    Args:
        device: Name of the device, such as `cuda:1`.

    Returns:
        On CUDA the peaks of bytes in tensors and of bytes that torch's allocator reserved. On the
        CPU None, and the peak of the resident set, with libraries and weights.
    """
    if device.startswith("cuda"):
        return (
            int(torch.cuda.max_memory_allocated(torch.device(device))),
            int(torch.cuda.max_memory_reserved(torch.device(device))),
        )
    return None, status_bytes("VmHWM")


def bytes_in_use(device: str) -> int:
    """Return the bytes that this process uses now: on CUDA in tensors, on the CPU resident."""
    if device.startswith("cuda"):
        return int(torch.cuda.memory_allocated(torch.device(device)))
    return status_bytes("VmRSS")


def reset_peak() -> None:
    """Free the memory that an earlier run in this process left, and reset the peak."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):  # a kernel may refuse; the old peak then stays
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS: proc(5)


def status_bytes(name: str) -> int:
    """Return a size from /proc/self/status in bytes.

    Args:
        name: Name in proc(5): VmRSS is the current resident set, VmHWM its peak.
    """
    text = Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


# Work that takes memory (an action, the load, a reference), and the options that lower it.
_MEMORY_OF: dict[Kind | Literal["reference"] | None, tuple[str, str]] = {
    Kind.ENCODE: ("encoding the image", "a smaller `height` and `width` lower it"),
    Kind.DENOISE: (
        "a denoising step",
        "fewer `num_frames`, a smaller `height` and `width`, or `memory_opt` lower it",
    ),
    Kind.DECODE: ("decoding the frames", "a smaller `decode_chunk_size` lowers it"),
    None: ("loading the model", "fewer ranks on this device, or no `dtype` fp32, lower it"),
    "reference": (
        "computing a clip in one process",
        "fewer `num_frames`, a smaller `height` and `width` or `decode_chunk_size` lower it",
    ),
}


@contextmanager
def out_of_memory_named(
    doing: Action | Literal["reference"] | None,
    device: torch.device | str | None = None,
    rank: int | None = None,
) -> Iterator[None]:
    """Turn an error that reports a lack of memory into one that names the work, device and bytes.

    Args:
        doing: Action at work; None while the model loads.
        device: Device on which the block works; None: not known yet.
        rank: Number of the rank; None: the process of the reference.

    Raises:
        OutOfMemoryError: Memory ran out. `details` has `device`, `rank`, and clip and step of an
            action; `requested_bytes` if the message says it (Python's own and those of CUDA's
            libraries do not); and `free_bytes`, measured if the message does not say it.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) and not isinstance(error, OutOfMemoryError):
            raise
        details = {"cause": first_line(error), **memory_details(error)}
        if device is not None:
            details["device"] = str(device)
        if rank is not None:
            details["rank"] = rank
        if isinstance(doing, Action):
            details = {"clip": doing.clip, "step": doing.start, **details}
        if "free_bytes" not in details and "device" in details:
            # The number matters less than the error, which a broken driver must not hide.
            with contextlib.suppress(SvdppError, OSError, RuntimeError):
                details["free_bytes"] = _free_bytes(details["device"])
        if isinstance(error, OutOfMemoryError):  # such as of a load, with words of its own
            raise OutOfMemoryError(error.message, error.hint, details=details) from error
        kind = doing.kind if isinstance(doing, Action) else doing
        part, knob = _MEMORY_OF.get(kind, (f"doing {doing}", "fewer ranks on this device lower it"))
        message = f"out of memory while {part}: {first_line(error)}"
        raise OutOfMemoryError(message, knob, details=details) from error


def _free_bytes(device: str) -> int:
    return gpus.free_bytes(device) if device.startswith("cuda") else gpus.available_bytes()


def apply_settings(*, num_threads: int, device: str, deterministic: bool = False) -> None:
    """Set what the bits depend on in this process. Call it before any work on the device.

    Args:
        num_threads: Threads of one operation on the CPU; the rounding of sums depends on it.
        device: Name of the device, such as `cuda:1`.
        deterministic: Torch's strict mode: operations without a deterministic kernel raise an
            error, and TF32 is off. False: torch keeps its own settings.
    """
    torch.set_num_threads(num_threads)
    if not deterministic:
        return
    # `use_deterministic_algorithms(True)` would import Inductor: seconds, and a folder.
    torch.set_deterministic_debug_mode("error")
    # Strict mode would fill fresh memory with NaN, at the price of a write; nothing reads it unset.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.startswith("cuda"):
        # One of the two values that NVIDIA documents as reproducible; cuBLAS reads it at first use.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


def _gpu_conditions(device: str) -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(torch.device(device))
    return {
        "gpu": gpu.name,
        "gpu_multiprocessors": gpu.multi_processor_count,
        "gpu_capability": f"{gpu.major}.{gpu.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "driver": gpus.driver_version(),
    }


class ClipProfiler:
    """torch.profiler over this rank's compute actions of one clip.

    It takes the second clip that the rank denoises, if there is one: the first meets cold caches.

    Args:
        path: Path of the trace, which is written after the clip's last action.
        device: Name of the rank's device.
    """

    def __init__(self, path: Path, device: str) -> None:
        self._path = path
        activities = [ProfilerActivity.CPU]
        if device.startswith("cuda"):
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self._first: Action | None = None
        self._last: Action | None = None

    def select_clip(self, actions: Sequence[Action]) -> None:
        """Choose the clip among the coming actions; only the first choice counts."""
        clips = list(dict.fromkeys(a.clip for a in actions if a.kind is Kind.DENOISE))
        if self._first is None and clips:
            chosen = clips[min(1, len(clips) - 1)]
            compute = [action for action in actions if action.clip == chosen and action.is_compute]
            self._first, self._last = compute[0], compute[-1]

    @contextlib.contextmanager
    def over(self, action: Action) -> Iterator[None]:
        """Profile from the start of the clip's first action to the end of its last.

        Raises:
            OutputError: The trace cannot be written.
        """
        if action == self._first:
            self._profile.start()
        yield
        if action == self._last:
            self._profile.stop()
            with output_files.atomic_output(str(self._path), ".json") as temporary:
                self._profile.export_chrome_trace(str(temporary))
