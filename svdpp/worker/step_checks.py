"""The check after each denoising step: whether the latent is finite, and the step's time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from svdpp.comm.streams import Readback
from svdpp.errors import NotFiniteError


class StepChecks:
    """Checks each step of one DENOISE; on CUDA one step late, so that the device never idles.

    `on_done` gets each step that passed, and its seconds on the device.
    """

    def __init__(
        self, device: torch.device, rank: int, on_done: Callable[[int, float], None]
    ) -> None:
        self._device = device
        self._rank = rank
        self._on_done = on_done
        self._last = Readback(device)
        self._queued: deque[tuple[int, Readback, Readback]] = deque()

    def add(self, step: int, latent: torch.Tensor) -> None:
        """Queues the check of the latent after `step`, and reads the checks that are due."""
        now = Readback(self._device, torch.isfinite(latent).all())
        self._queued.append((step, self._last, now))
        self._last = now
        self._read(keep=1 if self._device.type == "cuda" else 0)

    def finish(self) -> None:
        """Waits for all checks."""
        self._read(keep=0)

    def _read(self, keep: int) -> None:
        while len(self._queued) > keep:
            step, before, after = self._queued.popleft()
            if not after.wait():
                raise NotFiniteError(
                    f"the latent is not finite after step {step}, done by rank {self._rank}",
                    "check the weights, or use --dtype bf16 or fp32, which have a larger range",
                )
            self._on_done(step, after.seconds_since(before))
