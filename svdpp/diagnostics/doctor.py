"""The checks of a machine before a run: everything that a run needs is actually tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from svdpp.config import (
    DUMMY_MODEL,
    ClipRequest,
    ModelConfig,
    OutputConfig,
    PipelineConfig,
    SvdSampling,
)
from svdpp.diagnostics.cut_test import cut_test
from svdpp.diagnostics.tiny_copy import NUM_STEPS
from svdpp.driver import jobs
from svdpp.driver.memory import estimate_ranks, free_memory
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import resolve
from svdpp.errors import OutOfMemoryError, OutputError, SvdppError, VerificationError
from svdpp.launch import process_group
from svdpp.launch.process_lifetime import temp_folder
from svdpp.media import output_files, video
from svdpp.models.checkpoint import Checkpoint

_GIB = 2**30
#: Enough for about a hundred clips and the log.
_MIN_FREE_BYTES = 2**28
# Small and quick, but real work for libx264.
_TRIAL_FRAMES, _TRIAL_SIDE = 4, 64


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check; `fix` is a hint if it failed."""

    name: str
    verdict: Literal["ok", "failed", "skipped"]
    detail: str
    fix: str = ""
    exit_code: int = 0


@dataclass
class Examination:
    """The state of an examination; checks fill it in."""

    config: PipelineConfig
    out: Path
    checkpoint: Checkpoint | None = None

    @property
    def model(self) -> Checkpoint:
        """The checkpoint, for checks of it."""
        if self.config.model.is_dummy:
            raise _Skipped("the dummy model has no files")
        if self.checkpoint is None:
            raise _Skipped("needs model")
        return self.checkpoint


class _Skipped(Exception):
    """The check does not apply, or depends on a failed one; the text says which."""


class _Attempt(NamedTuple):
    run: Callable[[Examination], str]
    fix: str = ""
    """A hint, for errors without one."""
    needs: tuple[str, ...] = ()
    """The checks that must have passed."""


def examine(examination: Examination) -> Iterator[Check]:
    """Runs the checks one after the other, and yields each result."""
    passed = set()
    for name, attempt in _CHECKS.items():
        try:
            for need in attempt.needs:
                if need not in passed:
                    raise _Skipped(f"needs {need}")
            detail = attempt.run(examination)
        except _Skipped as reason:
            yield Check(name=name, verdict="skipped", detail=str(reason))
        except SvdppError as error:
            yield Check(
                name=name,
                verdict="failed",
                detail=error.message,
                fix=error.hint or attempt.fix,
                exit_code=error.exit_code,
            )
        else:
            passed.add(name)
            yield Check(name=name, verdict="ok", detail=detail)


def _devices(examination: Examination) -> str:
    config = examination.config
    process_group.check_devices(config.device, config.world_size)
    backend = process_group.choose_backend(config.device, config.world_size)
    ranks = f"{config.world_size} rank{'s' if config.world_size > 1 else ''}"
    if config.device == "cpu":
        threads = f"{config.num_threads} thread{'s' if config.num_threads > 1 else ''}"
        return f"{ranks} on the CPU, {threads} each, over {backend}"
    return f"{ranks} on {config.device}, over {backend}"


def _transfers(examination: Examination) -> str:
    if examination.config.world_size == 1:
        raise _Skipped("one rank has no neighbour")
    config = _dummy_run(examination.config)
    with Pipeline(config) as pipeline:
        pipeline.run([ClipRequest(seed=seed) for seed in range(3)])
    packets = pipeline.trace.transfers
    arrived = [packet for packet in packets if packet.direction == "recv" and packet.clip]
    slowest = max(arrived, key=lambda packet: packet.end - packet.start)
    milliseconds = (slowest.end - slowest.start) * 1000
    links = len(config.layout.links)
    return (
        f"{links} link{'s' * (links > 1)} with checksums, at worst {slowest.peer} -> "
        f"{slowest.rank}: {jobs.size(slowest.num_bytes)} in {milliseconds:.2f} ms"
    )


def _dummy_run(config: PipelineConfig) -> PipelineConfig:
    """The ranks of `config`, each with one step of the dummy model."""
    return PipelineConfig(
        world_size=config.world_size,
        model=ModelConfig(name=DUMMY_MODEL),
        sampling=SvdSampling(num_inference_steps=config.world_size),
        device=config.device,
        num_threads=config.num_threads,
        checksum=True,
        timeout_seconds=config.timeout_seconds,
        start_timeout_seconds=config.start_timeout_seconds,
        allow_mixed_devices=config.allow_mixed_devices,
    )


def _ffmpeg(examination: Examination) -> str:  # noqa: ARG001
    """Encodes some frames; the writer reads them back and counts them."""
    video.find_ffmpeg()
    frames = np.zeros((_TRIAL_FRAMES, _TRIAL_SIDE, _TRIAL_SIDE, 3), np.uint8)
    frames[:, :, :, 0] = np.arange(_TRIAL_SIDE)
    with temp_folder("svdpp-doctor-") as folder:
        path = folder / "clip.mp4"
        video.write_clip(frames, OutputConfig(path=str(path)), fps=7, metadata={"trial": True})
        size = path.stat().st_size
    return f"{_TRIAL_FRAMES} frames encoded and read back, {size} bytes"


def _output(examination: Examination) -> str:
    folder = examination.out
    output_files.check_writable(folder)
    free = jobs.free_bytes(folder)
    if free < _MIN_FREE_BYTES:
        raise OutputError(
            f"{str(folder)!r} has {free / 2**20:.0f} MiB free",
            "free some space, or name another folder with --out",
        )
    return f"{str(folder)!r} can be written, {free / _GIB:.1f} GiB free"


def _model(examination: Examination) -> str:
    if examination.config.model.is_dummy:
        raise _Skipped("the dummy model has no files")
    # A check of a few seconds must not download; `run` does.
    local = replace(examination.config.model, local_files_only=True)
    examination.config, examination.checkpoint = resolve(replace(examination.config, model=local))
    assert examination.checkpoint is not None
    files = map(examination.checkpoint.weight_files, examination.checkpoint.weighted)
    num_weights = sum(len(header) for headers in files for header in headers.values())
    return f"{local.name}: {num_weights} weights complete, safetensors, no code, no pickle"


def _memory(examination: Examination) -> str:
    """The plan's estimate for each rank, against the free memory of its device."""
    config = examination.config
    if not config.model.is_dummy:
        _ = examination.model
    needed = estimate_ranks(config)
    if config.device == "cuda":
        devices = {f"cuda:{rank}": size for rank, size in enumerate(needed)}
    else:
        devices = {config.device: sum(needed)}
    for device, size in sorted(devices.items(), key=lambda item: item[1]):
        free = free_memory(device)
        text = f"{size / _GIB:.2f} GiB estimated for {device}, {free / _GIB:.2f} GiB free"
        if size > free:
            raise OutOfMemoryError(
                text,
                "--decode-chunk-size 2, --memory-opt, fewer ranks, or no --dtype fp32 lower it",
                details={"asked": size, "free": free},
            )
    return text


def _cut_test(examination: Examination) -> str:
    """A tiny copy of the model, with a rank for each step."""
    config, checkpoint = examination.config, examination.model
    device = "cuda:0" if config.device == "cuda" else config.device
    with temp_folder("svdpp-doctor-") as folder:
        result = cut_test(checkpoint, folder, replace(config, device=device))
    if (found := result.first_difference) is not None:
        raise VerificationError(f"other bits than diffusers' whole call: {found}")
    return (
        f"a tiny copy of {config.model.name} on a rank for each of its {NUM_STEPS} steps: bitwise "
        f"equal to diffusers' whole call ({config.model.dtype})"
    )


_REPORT = "report it with the output of svdpp env"

_CHECKS: dict[str, _Attempt] = {
    "devices": _Attempt(
        _devices, "svdpp env shows the devices; --device cpu --model demo needs none"
    ),
    "ffmpeg": _Attempt(_ffmpeg, "pip install --force-reinstall imageio-ffmpeg"),
    "output folder": _Attempt(_output, "name another folder with --out"),
    "model": _Attempt(_model, "copy or download the model again, or --model demo"),
    "memory": _Attempt(_memory, "fewer ranks, or a smaller clip", ("devices",)),
    "transfers": _Attempt(
        _transfers, f"on GPUs try PIPELINE_BACKEND=gloo; {_REPORT}", ("devices",)
    ),
    "cut test": _Attempt(_cut_test, _REPORT, ("devices",)),
}
