"""One DENOISE of a clip: its steps, the check of each latent, and the exchange within a pair."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from svdpp.comm import streams
from svdpp.comm.packet import Packet
from svdpp.comm.streams import Readback
from svdpp.comm.transport import PendingPacket, Transport
from svdpp.errors import NotFiniteError
from svdpp.models.base import LATENTS, PREDICTION, Tensors, VideoModel
from svdpp.plan.actions import Action
from svdpp.worker.device import MemoryPressure
from svdpp.worker.messages import StepDone
from svdpp.worker.reporter import Reporter
from svdpp.worker.tensor_files import TensorStore, solver_history


class NotWantedError(Exception):
    """The clip was cancelled, or the other rank of the pair has dropped it."""


@dataclass(kw_only=True)
class RankTools:
    """What all actions of a rank work with.

    `is_cancelled` says between steps whether the parent needs nothing more of a clip;
    `tensor_store` keeps latents and predictions for verification.
    """

    rank: int
    device: torch.device
    transport: Transport
    reporter: Reporter
    is_cancelled: Callable[[int], bool] = lambda _: False
    tensor_store: TensorStore | None = None
    memory_pressure: MemoryPressure = field(init=False)
    _copies: streams.SideStream = field(init=False)

    def __post_init__(self) -> None:
        self.memory_pressure = MemoryPressure(self.device)
        self._copies = streams.SideStream(self.device)

    def check_wanted(self, clip: int) -> None:
        """Raises NotWantedError if the parent needs nothing more of `clip`."""
        if self.is_cancelled(clip):
            raise NotWantedError

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A complete copy in host memory."""
        return self._copies.to_host(tensor.contiguous(), streams.mark(self.device))


class Denoising:
    """One DENOISE; if its action has a peer, the `Partner` of the model's call.

    The ranks of a pair send each other one message at each step until one drops the clip. The
    packet's `memory_pressure` is that of both.
    """

    def __init__(self, tools: RankTools, action: Action, packet: Packet) -> None:
        self._tools, self._action, self._packet = tools, action, packet
        self._is_paired = action.peer >= 0
        self.branch = int(self._is_paired and tools.rank > action.peer)
        self._next: int | None = action.start
        self._pending: PendingPacket | None = None

    def run(self, model: VideoModel) -> None:
        """Does the steps, each of them checked; the packet then has the result."""
        tools, action, packet = self._tools, self._action, self._packet
        tools.reporter.at(action, action.start)
        checks = StepChecks(tools.device, tools.rank, self._report_step)

        def after_step(step: int, latent: torch.Tensor) -> None:
            checks.add(step, latent)
            self._before_step(step + 1)

        self._before_step(action.start)
        partner = self if self._is_paired else None
        packet.tensors = model.denoise(
            packet.tensors, action.start, action.end, after_step, partner
        )
        checks.finish()
        packet.memory_pressure |= tools.memory_pressure.rose()
        if self.branch == 0:  # both ranks of a pair have the same latent
            self._keep_latent()

    def exchange(self, step: int, evaluate: Callable[[], Tensors]) -> Tensors:
        """The other rank's prediction of `step`, for this rank's, which `evaluate` computes.

        Raises:
            NotWantedError: the other rank has dropped the clip.
        """
        tools, clip = self._tools, self._action.clip
        pending = self._expected(step)  # before this rank's own evaluation
        tensors = evaluate()
        self._packet.memory_pressure |= tools.memory_pressure.rose()
        self._send(step, tensors)
        packet = self._arrived(step, pending)
        self._packet.memory_pressure |= packet.memory_pressure
        self._next = None if packet.tombstone else step + 1
        if packet.tombstone:
            raise NotWantedError
        if tools.tensor_store is not None:
            prediction = tools.on_host(next(iter(packet.tensors.values())))
            name = f"step{step}_branch{1 - self.branch}"
            tools.tensor_store.keep(clip, name, {PREDICTION: prediction})
        return packet.tensors

    def drop(self) -> None:
        """Tells the other rank, in place of the next prediction, that this one drops the clip."""
        if not self._is_paired or self._next is None or self._next == self._action.end:
            return
        pending = self._expected(self._next)
        self._send(self._next, None)
        self._arrived(self._next, pending)

    def _expected(self, step: int) -> PendingPacket:
        """The message of `step`; begins to receive it, unless an evaluation that failed has."""
        if self._pending is None:
            clip, peer = self._action.clip, self._action.peer
            self._pending = self._tools.transport.post_receive(clip, step, peer, "predictions")
        return self._pending

    def _arrived(self, step: int, pending: PendingPacket) -> Packet:
        self._tools.reporter.at(self._action, step, waiting=True)  # part of the step's time
        packet = pending.wait()
        self._tools.reporter.at(self._action, step)
        self._pending = None
        return packet

    def _send(self, step: int, tensors: Tensors | None) -> None:
        packet = Packet(self._action.clip, step, 0.0, tensors or {}, tombstone=tensors is None)
        packet.memory_pressure = self._packet.memory_pressure
        self._tools.transport.send(packet, self._action.peer, "predictions")

    def _before_step(self, step: int) -> None:
        """Ends the action if its clip is not wanted any more; notes the step that follows."""
        if step == self._action.end:
            return
        tools, action = self._tools, self._action
        tools.check_wanted(action.clip)
        tools.reporter.at(action, step)

    def _report_step(self, step: int, seconds: float) -> None:
        event = StepDone(clip=self._action.clip, step=step, seconds=seconds)
        self._tools.reporter.send(event)

    def _keep_latent(self) -> None:
        tools, tensors = self._tools, self._packet.tensors
        if tools.tensor_store is not None:
            kept = {LATENTS: tensors[LATENTS], **solver_history(tensors)}
            on_host = {name: tools.on_host(tensor) for name, tensor in kept.items()}
            tools.tensor_store.keep(self._action.clip, f"step{self._action.end}", on_host)


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
