"""What a rank says of itself: events, heartbeats, samples of its GPU, and the profile of a clip."""

from __future__ import annotations

import base64
import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from svdpp.comm.transport import Transfer
from svdpp.errors import error_to_dict
from svdpp.launch import gpus
from svdpp.launch.group import Channel
from svdpp.media import output_files
from svdpp.plan.actions import Action, Kind
from svdpp.worker.device import bytes_in_use
from svdpp.worker.messages import (
    CheckpointLost,
    ClipFailed,
    Event,
    Failed,
    GpuSample,
    Heartbeat,
    StoredTensor,
    TransferDone,
)

HEARTBEAT_SECONDS = SAMPLE_SECONDS = 1.0


class Reporter:
    """Sends a rank's events to the parent; any thread may call it.

    `other_host` is the rank's host, named in the errors of clips, if it is not that of rank 0.
    """

    def __init__(self, channel: Channel, other_host: str = "") -> None:
        self._channel = channel
        self._other_host = other_host
        self._now = Heartbeat()
        self._device = ""
        self._writers: list[Callable[[], bool]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._heartbeat, name="heartbeat", daemon=True)
        self._sampler: threading.Thread | None = None

    def start(self) -> None:
        """Starts the heartbeats."""
        self._thread.start()

    def sample_gpu(self, uuid: str) -> None:
        """Sends a sample of a GPU every second from now on; without NVML nothing.

        In a thread of its own, because a driver that hangs must not stop the heartbeats.
        """
        uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        sampler = threading.Thread(target=self._sample, args=(uuid,), name="sampler", daemon=True)
        sampler.start()
        self._sampler = sampler

    def stop(self) -> None:
        """Stops heartbeats and samples; does not wait for a driver that hangs."""
        self._stopped.set()
        self._thread.join()
        if self._sampler is not None:
            self._sampler.join(timeout=SAMPLE_SECONDS)

    def add_writer(self, is_busy: Callable[[], bool]) -> None:
        """Adds a writer thread; heartbeats report whether it is busy."""
        self._writers.append(is_busy)

    def measure_memory(self, device: str) -> None:
        """From now on, heartbeats report the memory in use on `device`."""
        self._device = device

    def send(self, event: Event) -> None:
        """Sends one event."""
        self._channel.send(event.to_bytes())

    def at(self, action: Action | None, step: int = -1, *, waiting: bool = False) -> None:
        """Sets what heartbeats report; sends one at once if the action or the waiting changes."""
        writing = self._is_writing()
        now = Heartbeat(action=action, step=step, waiting=waiting, writing=writing)
        changed = (now.action, now.waiting) != (self._now.action, self._now.waiting)
        self._now = now
        if changed:
            self.send(now.model_copy(update={"memory_bytes": self._memory()}))

    def phase(self, phase: str, peer: int = -1) -> None:
        """Sets what heartbeats report before the rank has joined."""
        self._now = Heartbeat(phase=phase, peer=peer)
        self.send(self._now)

    def transfer(self, transfer: Transfer) -> None:
        """Reports a clip's packet that was received or sent; steps and decodes include others."""
        values = transfer._asdict()
        if values.pop("channel") == "clips":
            self.send(TransferDone(**values))

    def tensor(self, name: str, data: bytes) -> None:
        """Sends a file of the tensor store to the parent, which keeps it."""
        self.send(StoredTensor(name=name, data=base64.b64encode(data)))

    def clip_failed(self, clip: int, error: BaseException) -> None:
        """Reports that `clip` alone is lost."""
        known = error_to_dict(error)
        if self._other_host:
            known["message"] = f"on {self._other_host}: {known['message']}"
        self.send(ClipFailed(clip=clip, error=known))

    def checkpoint_lost(self, error: BaseException) -> None:
        """Reports that latent checkpoints cannot be written; the clips go on."""
        self.send(CheckpointLost(error=error_to_dict(error)))

    def failed(self, error: BaseException) -> None:
        """Reports the error that ends the rank, and what it was doing."""
        self.send(
            Failed(
                error=error_to_dict(error),
                traceback="".join(traceback.format_exception(error)),
                action=self._now.action,
                step=self._now.step,
            )
        )

    def _memory(self) -> int | None:
        if self._device:
            with contextlib.suppress(OSError, RuntimeError):  # a heartbeat matters more
                return bytes_in_use(self._device)
        return None

    def _is_writing(self) -> bool:
        return any(is_busy() for is_busy in self._writers)

    def _heartbeat(self) -> None:
        with contextlib.suppress(OSError):  # the parent is gone, and this process ends with it
            while True:
                current = {"writing": self._is_writing(), "memory_bytes": self._memory()}
                self.send(self._now.model_copy(update=current))
                if self._stopped.wait(HEARTBEAT_SECONDS):
                    return

    def _sample(self, uuid: str) -> None:
        with gpus.open_nvml() as nvml:
            if nvml is None:
                return
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            except nvml.NVMLError:
                return
            with contextlib.suppress(OSError):  # as in `_heartbeat`
                while not self._stopped.is_set():
                    self.send(read_sample(nvml, handle))
                    self._stopped.wait(SAMPLE_SECONDS)


#: Bits of NVML's clock event reasons (nvml.h) that slow a busy GPU down.
_SLOWED = 0x04 | 0x08 | 0x20 | 0x40 | 0x80  # power cap, hardware, software and heat, brake


def read_sample(nvml: Any, handle: Any) -> GpuSample:
    """One sample; None for a value that the GPU does not give."""

    def read(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):  # an old GPU, or an old driver's module
            return None

    rates, memory = read("nvmlDeviceGetUtilizationRates"), read("nvmlDeviceGetMemoryInfo")
    milliwatts = read("nvmlDeviceGetPowerUsage")
    reasons = read("nvmlDeviceGetCurrentClocksThrottleReasons")
    return GpuSample(
        when=time.monotonic(),
        utilisation=None if rates is None else rates.gpu / 100,
        memory_bytes=None if memory is None else memory.used,
        watts=None if milliwatts is None else milliwatts / 1000,
        celsius=read("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        sm_mhz=read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        throttled=((reasons or 0) & _SLOWED).bit_count(),
    )


#: The only rank that is on the parent's machine even under torchrun.
PROFILED_RANK = 0


class ClipProfiler:
    """Profiles this rank's compute actions of one clip, and writes the trace.

    It takes the second clip that the rank denoises, because the first meets cold caches; the first
    if there is only one. The profiler slows this clip down.
    """

    def __init__(self, path: Path, device: str) -> None:
        self._path = path
        activities = [ProfilerActivity.CPU]
        if device.startswith("cuda"):
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self._first: Action | None = None
        self._last: Action | None = None

    def expect(self, actions: Sequence[Action]) -> None:
        """Chooses the clip among the coming actions; only the first choice counts."""
        clips = list(dict.fromkeys(a.clip for a in actions if a.kind is Kind.DENOISE))
        if self._first is None and clips:
            chosen = clips[min(1, len(clips) - 1)]
            compute = [action for action in actions if action.clip == chosen and action.is_compute]
            self._first, self._last = compute[0], compute[-1]

    @contextlib.contextmanager
    def over(self, action: Action) -> Iterator[None]:
        """Profiles from the start of the clip's first action to the end of its last."""
        if action == self._first:
            self._profile.start()
        yield
        if action == self._last:
            self._profile.stop()
            with output_files.atomic_output(str(self._path), ".json") as temporary:
                self._profile.export_chrome_trace(str(temporary))
