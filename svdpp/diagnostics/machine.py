"""Facts about the machine for `env`, checks for `doctor`, and measured costs for `profile`."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from huggingface_hub.constants import HF_HUB_CACHE

import svdpp
from svdpp.config import (
    DEMO_MODEL,
    DUMMY_MODEL,
    ClipRequest,
    ModelConfig,
    OutputConfig,
    PipelineConfig,
    SvdSampling,
)
from svdpp.config.sampling import PromptedSampling
from svdpp.diagnostics.attention_trial import BackendTrial, try_backends
from svdpp.diagnostics.run_metrics import average_costs
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import estimate_parts, estimate_ranks, resolve_config
from svdpp.driver.supervisor import OpenObserver
from svdpp.driver.trace import Trace
from svdpp.errors import (
    OutOfMemoryError,
    OutputError,
    SvdppError,
    VerificationError,
    pluralize,
    redact_all,
)
from svdpp.launch import gpus, process_group
from svdpp.launch.gpus import available_bytes
from svdpp.launch.process_lifetime import temp_folder
from svdpp.launch.world import World
from svdpp.media import output_files, video
from svdpp.media.ffmpeg import find_ffmpeg
from svdpp.media.inputs import example_requests
from svdpp.plan.costs import CostModel
from svdpp.verification.verify import verify

# --- facts about the machine, for `svdpp env` ----------------------------------------------------

_LIBRARIES = (
    *("torch", "diffusers", "transformers", "accelerate", "safetensors", "huggingface-hub"),
    *("numpy", "pillow", "imageio-ffmpeg"),
)

#: Environment variables that `svdpp env` shows if they are set. No other variables are shown.
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING"),
    *("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "PYTORCH_CUDA_ALLOC_CONF"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "MKL_CBWR"),
    *("NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"),
    *("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    *("PIPELINE_BACKEND", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "IMAGEIO_FFMPEG_EXE", "TMPDIR"),
    "DIFFUSERS_ATTN_BACKEND",
)
_COMMAND_SECONDS = 10.0


def environment() -> dict[str, Any]:
    """Return facts about machine and libraries on which results depend, for `svdpp env`.

    Returns:
        Plain values; None for a fact that is unknown. The user's home is shown as `~`.
    """
    facts = {
        "schema_version": 1,
        "versions": _versions(),
        "git": _git(),
        "host": _host(),
        "devices": {
            "gpus": [
                {"name": gpu.name, "memory_bytes": gpu.total_bytes, "capability": gpu.capability}
                for gpu in gpus.visible_gpus()
            ],
            "clocks": gpu_clocks(_run_command),
            "topology": (_run_command("nvidia-smi", "topo", "-m") or "").splitlines(),
        },
        "ffmpeg": _ffmpeg_version(),
        "hub_cache": {"path": HF_HUB_CACHE},
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    return dict(redact_all(facts))


#: Fields that are queried with nvidia-smi, which ignores CUDA_VISIBLE_DEVICES and lists all GPUs.
_CLOCKS = (
    *("index", "name", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem"),
    *("power.limit", "power.default_limit", "persistence_mode"),
)


def gpu_clocks(output: Callable[..., str | None]) -> list[dict[str, str]]:
    """Return clocks and power limits of all GPUs, as nvidia-smi prints them, by field.

    Args:
        output: Function that runs a command and returns its output, or None if it fails.
    """
    rows = output("nvidia-smi", f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader")
    values = [line.split(", ") for line in (rows or "").splitlines()]
    return [dict(zip(_CLOCKS, row, strict=False)) for row in values]


def _clock_mhz() -> dict[str, float] | None:
    """Return current, minimum and maximum clock rate of the CPU in MHz; None if unknown."""
    try:
        clock = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        return None
    if clock is None:
        return None
    # A virtual machine reports 0 for limits that it does not know.
    return {name: round(mhz) for name, mhz in clock._asdict().items() if mhz}


def cpu_model() -> str:
    """Return the name of this machine's CPU."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, Any]:
    return {
        "svdpp": svdpp.__version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _LIBRARIES},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
        "driver": gpus.driver_version(),
    }


def _git() -> dict[str, Any] | None:
    """Return commit and state of the git checkout of svdpp; None if svdpp does not run from one."""
    root = Path(svdpp.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    sha = _run_command("git", "-C", str(root), "rev-parse", "HEAD")
    if sha is None:
        return None
    return {
        "sha": sha,
        "dirty": bool(_run_command("git", "-C", str(root), "status", "--porcelain")),
    }


def _host() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "clock_mhz": _clock_mhz(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "available_bytes": available_bytes(),
        "argv": sys.argv,
    }


def _ffmpeg_version() -> dict[str, Any] | None:
    try:
        path = find_ffmpeg()
    except OutputError:
        return None
    words = (_run_command(path, "-version") or "").split()
    return {"path": path, "version": words[2] if words[:2] == ["ffmpeg", "version"] else None}


def _run_command(*command: str) -> str | None:
    """Return the output of a system command, stripped; None if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# --- checks, for `svdpp doctor` ------------------------------------------------------------------

_GIB = 2**30
#: Minimum free bytes of the output folder's disk, enough for about a hundred clips and the log.
_MIN_FREE_BYTES = 2**28
# Side of a frame in pixels, number of frames, and number of steps of the test clips. The clips are
# small, but use the same code of libx264 and of the demo model as larger clips.
_SIDE, _FRAMES, _STEPS = 64, 4, 4


@dataclass(frozen=True, kw_only=True)
class Check:
    """Result of one check of `svdpp doctor`."""

    name: str
    verdict: Literal["ok", "failed", "skipped", "differs"]
    """Result in a word. `differs` means that an attention backend which the run does not use gave
    different bits for equal inputs."""
    detail: str
    """Measured facts, the error's message, or the reason why the check was skipped."""
    fix: str = ""
    """Hint for the user if the check failed; empty if the check passed or no hint is known."""
    exit_code: int = 0
    """Exit code of the error; 0 if the check did not fail."""


class _Skipped(Exception):
    """Exception for a check of `doctor` that does not apply or depends on a failed check.

    The text of the exception is the reason.
    """


def run_checks(config: PipelineConfig, out: Path) -> Iterator[Check]:
    """Run all checks of `svdpp doctor` for a run, and yield the result of each.

    Args:
        config: Configuration of a run.
        out: Output folder of the run.
    """
    passed = set()
    for name, (check, needed) in _CHECKS.items():
        try:
            if missing := [other for other in needed if other not in passed]:
                raise _Skipped(f"the check {missing[0]!r} has not passed")
            found = check(config, out)
        except _Skipped as reason:
            yield Check(name=name, verdict="skipped", detail=str(reason))
        except SvdppError as error:
            code, fix = error.exit_code, error.hint or _FIXES.get(name, "")
            yield Check(name=name, verdict="failed", detail=error.message, fix=fix, exit_code=code)
        else:
            passed.add(name)
            if isinstance(found, str):
                yield Check(name=name, verdict="ok", detail=found)
            else:
                yield from found


def _check_devices(config: PipelineConfig, _: Path) -> str:
    process_group.check_devices(config.device, config.world_size)
    backend = process_group.choose_backend(config.device, config.world_size)
    ranks = pluralize(config.world_size, "rank")
    threads = pluralize(config.num_threads, "thread")
    return f"{ranks} on {config.device}, {threads} each, over {backend}"


def _check_ffmpeg(config: PipelineConfig, out: Path) -> str:  # noqa: ARG001
    """Run the `doctor` check of ffmpeg: encode a short clip, read it back, compare the shape."""
    find_ffmpeg()
    frames = np.zeros((_FRAMES, _SIDE, _SIDE, 3), np.uint8)
    frames[:, :, :, 0] = np.arange(_SIDE)
    with temp_folder("svdpp-doctor-") as folder:
        path = folder / "clip.mp4"
        video.write_clip(frames, OutputConfig(path=str(path)), fps=7, metadata={"trial": True})
        size = path.stat().st_size
    return f"{_FRAMES} frames encoded and read back, {size} bytes"


def _check_output_folder(config: PipelineConfig, folder: Path) -> str:  # noqa: ARG001
    output_files.check_writable(folder)
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < _MIN_FREE_BYTES:
        raise OutputError(
            f"{str(folder)!r} has {free / 2**20:.0f} MiB free",
            "free some space, or name another folder with `out`",
            details={"path": str(folder), "free_bytes": free, "lowest_bytes": _MIN_FREE_BYTES},
        )
    return f"{str(folder)!r} can be written, {free / _GIB:.1f} GiB free"


def _check_model(config: PipelineConfig, _: Path) -> str:
    checkpoint = resolve_config(config)[1]
    if checkpoint is None:
        raise _Skipped("the dummy model has no files")
    files = map(checkpoint.weight_files, checkpoint.weighted_components)
    num_weights = sum(len(dtypes) for each in files for dtypes in each.values())
    return f"{checkpoint.name}: {num_weights} weights, all in safetensors files, no code or pickles"


def _check_memory(config: PipelineConfig, _: Path) -> str:
    """Run the `doctor` check that each rank's estimated memory fits in its device's free memory."""
    needed = estimate_ranks(*resolve_config(config, weights="none"))
    if config.device == "cuda":
        devices = {f"cuda:{rank}": size for rank, size in enumerate(needed)}
    else:
        devices = {config.device: sum(needed)}
    for device, size in sorted(devices.items(), key=lambda item: item[1]):
        free = available_bytes() if device == "cpu" else gpus.free_bytes(device)
        text = f"{size / _GIB:.2f} GiB estimated for {device}, {free / _GIB:.2f} GiB free"
        if size > free:
            raise OutOfMemoryError(
                text,
                "use `decode_chunk_size` 2, or use `memory_opt`, or use fewer ranks, or use a "
                "16-bit `dtype`",
                details={"requested_bytes": size, "free_bytes": free, "device": device},
            )
    return text


def _check_transfers(config: PipelineConfig, _: Path) -> str:
    """Run the `doctor` check of transfers: ranks send latents of the dummy model with checksums."""
    if config.world_size == 1:
        raise _Skipped("one rank has no neighbour")
    dummy = replace(
        config,
        model=ModelConfig(name=DUMMY_MODEL),
        sampling=SvdSampling(num_inference_steps=config.world_size),
        checksum=True,
        expert_boundary=None,
    )
    with Pipeline(dummy) as pipeline:
        pipeline.run([ClipRequest(seed=seed) for seed in range(3)])
    arrived = [packet for packet in pipeline.trace.received if packet.clip]
    slowest = max(arrived, key=lambda packet: packet.end - packet.start)
    megabytes, seconds = slowest.num_bytes / 1e6, slowest.end - slowest.start
    ends = f"{slowest.peer} -> {slowest.rank}"
    return f"checksums agree; slowest: rank {ends}, {megabytes:.3f} MB in {1000 * seconds:.2f} ms"


def _check_demo_clip(config: PipelineConfig, _: Path) -> str:
    """Run the `doctor` check that ranks make a demo clip with the same bits as diffusers."""
    sampling = SvdSampling(
        num_inference_steps=_STEPS, height=_SIDE, width=_SIDE, num_frames=_FRAMES
    )
    demo = replace(
        config.single_rank(),
        world_size=_STEPS,
        device="cuda:0" if config.device == "cuda" else config.device,
        model=ModelConfig(name=DEMO_MODEL, dtype=config.model.dtype),
        sampling=sampling,
        expert_boundary=None,
    )
    result = verify(demo, example_requests(demo, 1))
    if (found := result.first_difference) is not None:
        raise VerificationError(
            f"the demo clip has other bits than the clip of diffusers: {found}",
            "report this error with the output of svdpp env",
            details=found.to_json(),
        )
    return f"the demo model on {_STEPS} ranks has the bits of diffusers ({config.model.dtype})"


def _check_attention(config: PipelineConfig, _: Path) -> list[Check]:
    """Run the `doctor` checks of each attention backend that runs on the device."""
    return [_check_of_backend(found) for found in try_backends(config)]


def _check_of_backend(found: BackendTrial) -> Check:
    name = f"attention {found.name}"
    if found.error is not None:
        error = found.error
        return Check(
            name=name,
            verdict="failed",
            detail=error.message,
            fix=error.hint,
            exit_code=error.exit_code,
        )
    dtypes = " and ".join(found.dtypes)
    if not found.other_bits_in:
        detail = f"gives equal bits for equal inputs, also in another process ({dtypes})"
        return Check(name=name, verdict="ok", detail=detail)
    detail = f"gives different bits for equal inputs in {' and '.join(found.other_bits_in)}"
    if not found.is_chosen:
        return Check(name=name, verdict="differs", detail=detail)
    return Check(
        name=name,
        verdict="failed",
        detail=detail,
        fix="leave `attention_backend` out, or verify within a tolerance: `atol`",
        exit_code=VerificationError.exit_code,
    )


#: Checks by name: the function, and the names of checks that must have passed before.
_CHECKS: dict[str, tuple[Callable[[PipelineConfig, Path], str | list[Check]], tuple[str, ...]]] = {
    "devices": (_check_devices, ()),
    "ffmpeg": (_check_ffmpeg, ()),
    "output folder": (_check_output_folder, ()),
    "model": (_check_model, ()),
    "memory": (_check_memory, ("devices", "model")),
    "transfers": (_check_transfers, ("devices",)),
    "attention": (_check_attention, ("devices",)),
    "cut test": (_check_demo_clip, ("devices",)),
}

#: Hints by the name of a check, for errors that have no hint of their own.
_FIXES = {
    "output folder": "name another folder with `out`",
    "transfers": "on GPUs try PIPELINE_BACKEND=gloo",
}


# --- measured costs, for `svdpp profile` ---------------------------------------------------------

_STEPS_PER_RANK = 2


def profile(
    config: PipelineConfig,
    *,
    repeats: int,
    log: Callable[[str], None],
    open_observer: OpenObserver,
    prompt: str | None,
) -> CostModel:
    """Measure encode, step, decode and transfer for `svdpp profile`, with all ranks at work.

    All ranks work, because CPU ranks share cores and memory bandwidth, and a single rank would be
    faster than in a run. Memory is not measured but estimated from the model's configs.

    Args:
        config: Resolved or unresolved configuration; its layout is not used.
        repeats: Number of clips that are measured at each rank, after a warm-up clip.
        log: Function that gets a line for each part that is measured.
        open_observer: Function that opens the progress display.
        prompt: Prompt of the clips; None: an example, if the model takes prompts.
    """
    config, checkpoint = resolve_config(measured_config(config), weights="all")
    pipeline, trace = Pipeline(config), Trace(config.world_size, first_clip=1)
    # Until the first clip reaches the last rank, some ranks are idle, and the others run faster
    # than usual. So, besides the `repeats` clips, one clip for each rank is made.
    num_clips = config.world_size + repeats
    log(f"measuring the times: {num_clips} clips, number of ranks {config.world_size}")
    requests = example_requests(config, num_clips, prompt=prompt)
    with open_observer("profile", pipeline.schedule(requests)) as progress:
        for observer in (progress, trace):
            pipeline.observe(observer)
        with pipeline:
            pipeline.run(requests)
    costs = median_costs(config, pipeline.world, [trace], source="measured by svdpp profile")
    log("estimating the memory of each part")
    memory: dict[str, Any] = estimate_parts(config, checkpoint).as_costs()
    return replace(costs, **memory)


def measured_config(config: PipelineConfig) -> PipelineConfig:
    """Return the configuration that `svdpp profile` measures: a copy of `config` with few steps.

    Each rank gets two steps, or more if the model's family requires more. If the family has a fixed
    number of steps, the copy keeps this number. A single rank gets four steps if the model takes
    prompts. Such a model may have two denoisers (experts), one for the first and one for the last
    steps, and both must be measured.

    Args:
        config: Configuration to measure. The copy differs from it only in the number of steps.
    """
    shares = max(config.world_size, 2 if isinstance(config.sampling, PromptedSampling) else 1)
    steps = _STEPS_PER_RANK * shares
    return replace(config, sampling=config.sampling.with_few_steps(steps, config.world_size))


def median_costs(
    config: PipelineConfig, world: World | None, traces: Sequence[Trace], *, source: str
) -> CostModel:
    """Return the median costs of a clip's encode, step, decode and transfer in `traces`.

    Ranks of different speed get separate costs if they run on GPUs or on several hosts. On the CPU
    of one host, all ranks get the same costs, because differences between them are noise.

    Args:
        config: Configuration of the measured run.
        world: Ranks and hosts as given by the launcher (such as torchrun) that started the ranks;
            None: this process started the ranks itself.
        traces: Trace of each measured run.
        source: Origin of the costs, for readers of the file.
    """
    per_host = None if world is None else world.ranks_per_host
    sampling = config.sampling
    size = f"{pluralize(sampling.frames, 'frame')} of {sampling.width}x{sampling.height}"
    on_cpu = config.device == "cpu"
    processors = [cpu_model()] if on_cpu else [gpu.name for gpu in gpus.visible_gpus()]
    ranks = pluralize(config.world_size, "rank")
    return average_costs(
        config,
        traces,
        average=statistics.median,
        per_rank=config.device == "cuda" or per_host is not None,
        ranks_per_host=per_host,
        name=f"{config.model.name} {config.model.dtype}, {size}",
        source=source,
        device=f"{ranks} on {', '.join(dict.fromkeys(processors))}",
    )
