"""`RankContext`: objects that all actions of a rank share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from svdpp.comm import streams
from svdpp.comm.transport import Transport
from svdpp.worker.background import ClipWriter, LatentCheckpointWriter, Reporter
from svdpp.worker.device import ClipProfiler, MemoryPressure
from svdpp.worker.tensor_files import TensorStore


class ClipCancelledError(Exception):
    """Error for a clip that was cancelled, or that the other rank of a pair has dropped.

    The two ranks of a pair share classifier-free guidance; see `worker.denoising.Denoising`.
    """


@dataclass(kw_only=True)
class RankContext:
    """Objects that all actions of a rank share, such as device, transport and writers."""

    rank: int
    device: torch.device
    transport: Transport
    reporter: Reporter
    clip_writer: ClipWriter
    checkpoint_writer: LatentCheckpointWriter | None = None
    profiler: ClipProfiler | None = None
    is_cancelled: Callable[[int], bool] = lambda _: False
    """Function that returns whether the parent has cancelled a clip, given the clip's index."""
    tensor_store: TensorStore | None = None
    """Store that keeps latents and predictions for verification; None: the run is not verified."""
    memory_pressure: MemoryPressure = field(init=False)
    _copies: streams.SideStream = field(init=False)

    def __post_init__(self) -> None:
        self.memory_pressure = MemoryPressure(self.device)
        self._copies = streams.SideStream(self.device)

    def check_not_cancelled(self, clip: int) -> None:
        """Raise a `ClipCancelledError` if the parent has cancelled the clip.

        Raises:
            ClipCancelledError: The clip was cancelled.
        """
        if self.is_cancelled(clip):
            raise ClipCancelledError

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Wait until a tensor on the device is computed; return a contiguous copy in host memory.

        Args:
            tensor: Tensor of any shape and dtype on the rank's device.
        """
        return self._copies.to_host(tensor.contiguous(), streams.record_event(self.device))
