"""Beside the steps of one DENOISE: the check of each latent, and the exchange within a pair."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from svdpp.comm.packet import Packet
from svdpp.comm.streams import Readback
from svdpp.comm.transport import PendingPacket, Transport
from svdpp.errors import NotFiniteError
from svdpp.models.base import Tensors
from svdpp.plan.actions import Action


class NotWantedError(Exception):
    """The clip was cancelled, or the other rank of the pair has dropped it."""


class Pair:
    """A `Partner` for one DENOISE; both ranks send one message at each step until one drops it.

    Args:
        transport: the rank's links.
        rank: this rank.
        action: a DENOISE whose peer is the other rank.
        clip: the clip's packet; its `memory_pressure` is that of both ranks.
        waiting: entered with a step, while the rank waits for the other one.
        sent: what is sent of a step, given what this rank computes.
        received: called with each step and the other rank's prediction.
    """

    def __init__(
        self,
        transport: Transport,
        rank: int,
        action: Action,
        clip: Packet,
        *,
        waiting: Callable[[int], AbstractContextManager[None]],
        sent: Callable[[int, Tensors], Tensors],
        received: Callable[[int, Tensors], None],
    ) -> None:
        self.branch = int(rank > action.peer)
        self._transport, self._action, self._clip = transport, action, clip
        self._waiting, self._sent, self._received = waiting, sent, received
        self._next: int | None = action.start
        self._pending: PendingPacket | None = None

    def exchange(self, step: int, evaluate: Callable[[], Tensors]) -> Tensors:
        """The other rank's prediction of `step`, for this rank's, which `evaluate` computes.

        Raises:
            NotWantedError: the other rank has dropped the clip.
        """
        pending = self._expected(step)
        self._send(step, self._sent(step, evaluate()))
        packet = self._arrived(step, pending)
        self._clip.memory_pressure |= packet.memory_pressure
        self._next = None if packet.tombstone else step + 1
        if packet.tombstone:
            raise NotWantedError
        self._received(step, packet.tensors)
        return packet.tensors

    def drop(self) -> None:
        """Tells the other rank, in place of the next prediction, that this one drops the clip."""
        if self._next is None or self._next == self._action.end:
            return
        pending = self._expected(self._next)
        self._send(self._next, None)
        self._arrived(self._next, pending)

    def _expected(self, step: int) -> PendingPacket:
        """The message of `step`; begins to receive it, unless an evaluation that failed has."""
        if self._pending is None:
            clip, peer = self._action.clip, self._action.peer
            self._pending = self._transport.post_receive(clip, step, peer, "predictions")
        return self._pending

    def _arrived(self, step: int, pending: PendingPacket) -> Packet:
        with self._waiting(step):
            packet = pending.wait()
        self._pending = None
        return packet

    def _send(self, step: int, tensors: Tensors | None) -> None:
        packet = Packet(self._action.clip, step, 0.0, tensors or {}, tombstone=tensors is None)
        packet.memory_pressure = self._clip.memory_pressure
        self._transport.send(packet, self._action.peer, "predictions")


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
