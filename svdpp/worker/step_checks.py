"""Owns the check after each denoising step: are the numbers finite, and how long did it take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from svdpp.comm.streams import Readback
from svdpp.errors import NotFiniteError


class StepChecks:
    """Checks each step of one DENOISE; on CUDA one step late, so that the queue never runs dry.

    Args:
        device: of the rank.
        rank: for the message of the error.
        on_done: called with each step that passed, and its seconds on the device.
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
        """Queues the check of the latent after `step`, and reads those that are due.

        Raises:
            NotFiniteError: naming the first step whose latent is not finite.
        """
        now = Readback(self._device, torch.isfinite(latent).all())
        self._queued.append((step, self._last, now))
        self._last = now
        self._read(keep=1 if self._device.type == "cuda" else 0)

    def finish(self) -> None:
        """Waits for all steps.

        Raises:
            NotFiniteError: as `add`.
        """
        self._read(keep=0)

    def _read(self, keep: int) -> None:
        while len(self._queued) > keep:
            step, before, after = self._queued.popleft()
            if not after.wait():
                raise NotFiniteError(
                    f"the latent is not finite after step {step}, done by rank {self._rank}",
                    "damaged weights, or too narrow a dtype? --dtype bf16 and fp32 reach further",
                )
            self._on_done(step, after.seconds_since(before))
