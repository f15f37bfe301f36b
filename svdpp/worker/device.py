"""Device of a rank: choice of the device, settings of torch, memory use, profiler of one clip."""

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
from svdpp.models.base import DTYPES
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.actions import Action, Kind


def take_device(config: PipelineConfig, world: World) -> torch.device:
    """Choose this rank's device, make it the thread's current device, and apply torch's settings.

    Args:
        config: Configuration; its device is `cpu`, `cuda` (a GPU for each rank) or `cuda:N`.
        world: Rank number, local rank and number of ranks.

    Raises:
        RequestError: The device does not exist, or cannot be used.
        OutOfMemoryError: The device has no memory for a CUDA context.
    """
    name = process_group.device_of_rank(config.device, world)
    device = torch.device(name)
    try:
        with out_of_memory_named("context", device, world.rank):
            streams.use_device(device)
    except OutOfMemoryError:  # a RuntimeError, which the next clause would report as another error
        raise
    except (AssertionError, RuntimeError, torch.cuda.DeferredCudaCallError) as error:
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
    """Return the conditions (torch settings, GPU, libraries) on which the bits of clips depend.

    Args:
        config: Configuration of the pipeline.
        checkpoint: Checkpoint of the model; None for the dummy model.
        device: Name of the rank's device.

    Returns:
        JSON values by name: settings of torch, the CPU's instruction set, and the class of the
        feature extractor if the model has one. On a GPU, also the GPU's model and the versions of
        libraries. With an attention backend, also its name, and whether it always gives equal bits
        for equal inputs on this device.

    Raises:
        RequestError: The attention backend does not run on the device in the model's dtype.
    """
    conditions: dict[str, Any] = {
        "memory_format": "channels_last" if config.model.channels_last else "contiguous",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if device.startswith("cuda"):
        conditions |= _gpu_conditions(device)
    if config.model.attention_backend is not None:
        # This import takes seconds, because it imports diffusers.
        from svdpp.models.engine.attention import attention_conditions

        dtype = DTYPES[config.model.dtype]
        conditions |= attention_conditions(config.model.attention_backend, device, dtype)
    # The class of SVD's feature extractor depends on the installed libraries, and may change bits.
    part = "feature_extractor"
    if checkpoint is not None and (name := dict(checkpoint.classes).get(part)):
        # This import takes seconds, because it imports diffusers.
        from svdpp.models.engine.load import component_class

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


# Number of retried and failed allocations on each device when this process created its first
# `MemoryPressure` for the device, that is, after it had loaded its first model. Only later ones
# count as a shortage of memory.
_events_before: dict[torch.device, int] = {}


class MemoryPressure:
    """Detector of shortages of GPU memory in this process.

    If memory runs short, cuDNN silently falls back to a kernel with a smaller workspace, which
    changes the bits, and keeps this choice for all later calls with the same shapes. So after the
    first shortage, the bits of all clips of the process may differ from those of a run without a
    shortage, even if a later pipeline makes the clips.

    Args:
        device: Device of the rank, on which the model has been loaded. On the CPU, nothing is
            detected.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = _events_before.setdefault(device, self._events())

    def has_occurred(self) -> bool:
        """Whether memory on the device ran short: an allocation has been retried or has failed."""
        return self._events() > self._before

    def _events(self) -> int:
        stats = torch.cuda.memory_stats(self._device) if self._device.type == "cuda" else {}
        return int(stats.get("num_alloc_retries", 0)) + int(stats.get("num_ooms", 0))


def peak_bytes(device: str) -> tuple[int | None, int]:
    """Return the peak memory of this process on a device, in bytes.

    Args:
        device: Name of the device, such as `cuda:1`.

    Returns:
        On CUDA, the peak of the bytes in tensors, and the peak of the bytes that torch's allocator
        reserved. On the CPU, None and the peak of the resident set.
    """
    if device.startswith("cuda"):
        return (
            int(torch.cuda.max_memory_allocated(torch.device(device))),
            int(torch.cuda.max_memory_reserved(torch.device(device))),
        )
    return None, status_bytes("VmHWM")


def bytes_in_use(device: str) -> int:
    """Return this process's bytes in use: tensors on CUDA, or the resident set on the CPU."""
    if device.startswith("cuda"):
        return int(torch.cuda.memory_allocated(torch.device(device)))
    return status_bytes("VmRSS")


def reset_peak() -> None:
    """Free memory that an earlier run in this process has left, and reset the memory peaks."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
    # "5" resets the peak VmHWM to VmRSS; see proc(5). Without permission, the old peak stays.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def status_bytes(name: str) -> int:
    """Return a memory size of this process from /proc/self/status, in bytes.

    Args:
        name: Name of the size, as in proc(5): VmRSS is the resident set, VmHWM is its peak.
    """
    text = Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


# For each kind of work: its name in messages about lack of memory, and a hint about options that
# need less memory. The key None stands for loading the model.
_MEMORY_OF: dict[Kind | Literal["context", "reference"] | None, tuple[str, str]] = {
    Kind.ENCODE: ("encoding the image", "use a smaller `height` and `width`"),
    Kind.DENOISE: (
        "running a denoising step",
        "use fewer `num_frames`, or use a smaller `height` and `width`, or use `memory_opt`",
    ),
    Kind.DECODE: (
        "decoding the frames",
        "use a smaller `decode_chunk_size`, or use `vae_tiling`",
    ),
    None: (
        "loading the model",
        "use fewer ranks on this device, or use `dtype` bf16 or fp16 instead of fp32",
    ),
    "context": ("creating the CUDA context", "use fewer ranks on this device"),
    "reference": (
        "computing a clip in one process",
        "use fewer `num_frames`, or use a smaller `height` and `width`, or use a smaller "
        "`decode_chunk_size`",
    ),
}


@contextmanager
def out_of_memory_named(
    doing: Action | Literal["context", "reference"] | None,
    device: torch.device | str | None = None,
    rank: int | None = None,
) -> Iterator[None]:
    """Turn out-of-memory errors in the `with` block into an `OutOfMemoryError` that names the work.

    Args:
        doing: Current action; "context" while the rank takes its device; "reference" while a
            verification recomputes a clip in one process; None while the model loads.
        device: Device on which the block works; None: not known yet.
        rank: Number of the rank; None: the block runs in the process of a verification.

    Raises:
        OutOfMemoryError: Memory ran out. `details` has `device` and `rank`, and for an action also
            `clip` and `step`. It has `requested_bytes` if the original message contains this
            number. `free_bytes` is taken from the original message, or else measured.
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
            # The free memory is only extra information, so a broken driver must not hide the
            # original error.
            with contextlib.suppress(SvdppError, OSError, RuntimeError):
                details["free_bytes"] = _free_bytes(details["device"])
        if isinstance(error, OutOfMemoryError):  # an OutOfMemoryError already names the work
            raise OutOfMemoryError(error.message, error.hint, details=details) from error
        kind = doing.kind if isinstance(doing, Action) else doing
        other = (f"doing {doing}", "use fewer ranks on this device")
        work, hint = _MEMORY_OF.get(kind, other)
        message = f"out of memory while {work}: {first_line(error)}"
        raise OutOfMemoryError(message, hint, details=details) from error


def _free_bytes(device: str) -> int:
    return gpus.free_bytes(device) if device.startswith("cuda") else gpus.available_bytes()


def apply_settings(*, num_threads: int, device: str, deterministic: bool = False) -> None:
    """Set those settings of torch (threads, determinism) on which the bits of clips depend.

    Call this before any work on the device.

    Args:
        num_threads: Number of intra-op threads on the CPU, on which the rounding of sums depends.
        device: Name of the device, such as `cuda:1`.
        deterministic: Whether operations without a deterministic kernel raise an error, and TF32 is
            off. False: torch's default settings are kept.
    """
    torch.set_num_threads(num_threads)
    if not deterministic:
        return
    # This call sets the same flag as `use_deterministic_algorithms`, but does not import Inductor,
    # which takes seconds and creates a folder.
    torch.set_deterministic_debug_mode("error")
    # By default, the mode also fills new tensors with NaN, which takes time and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device.startswith("cuda"):
        # NVIDIA documents two values of this variable as reproducible; this is one of them. cuBLAS
        # reads the variable only at its first use.
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
    """Profiler that records a rank's work on one clip (encode, steps, decode) by torch.profiler.

    The profiled clip is the second clip that the rank denoises, because caches are cold for the
    first clip. If there is only one clip, that clip is profiled.

    Args:
        path: Path of the trace, which is written after the clip's last compute action.
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
        """Choose the clip to profile, given coming actions. Only the first call has an effect."""
        clips = list(dict.fromkeys(a.clip for a in actions if a.kind is Kind.DENOISE))
        if self._first is None and clips:
            chosen = clips[min(1, len(clips) - 1)]
            compute = [action for action in actions if action.clip == chosen and action.is_compute]
            self._first, self._last = compute[0], compute[-1]

    @contextlib.contextmanager
    def over(self, action: Action) -> Iterator[None]:
        """Profile an action, which the `with` block runs, if it belongs to the chosen clip.

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
