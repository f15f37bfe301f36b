"""Execution of a DENOISE action: steps, checks of latents, exchange of guidance branches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from svdpp.comm.packet import Packet, Specs, TensorSpec
from svdpp.comm.streams import AsyncFlag
from svdpp.comm.transport import PendingPacket
from svdpp.errors import (
    NotFiniteError,
)
from svdpp.models.base import LATENTS, PREDICTION, Tensors
from svdpp.models.video_model import VideoModel
from svdpp.plan.actions import Action
from svdpp.worker.messages import (
    StepDone,
)
from svdpp.worker.rank_context import ClipCancelledError, RankContext
from svdpp.worker.tensor_files import solver_history


class Denoising:
    """Execution of one DENOISE action, by this rank alone or with the other rank of a pair.

    Ranks 2u and 2u + 1 form pair u, and run the same steps. Each rank evaluates one branch of
    classifier-free guidance, and in each step the ranks exchange their predictions:

        rank 2u      receive posted | evaluates branch 0 | sends | waits for branch 1 | scheduler
        rank 2u + 1  receive posted | evaluates branch 1 | sends | waits for branch 0 | scheduler

    A rank that drops the clip sends a tombstone (a packet without tensors, see `Packet`) instead of
    its next prediction, because its partner has already posted the receive.

    Args:
        context: Context of the rank.
        action: Action to perform, a DENOISE.
        packet: Packet of the clip before the first step of the action.
    """

    def __init__(self, context: RankContext, action: Action, packet: Packet) -> None:
        self._context, self._action, self._packet = context, action, packet
        self._is_paired = action.peer >= 0
        self.branch = int(self._is_paired and context.rank > action.peer)
        self._next: int | None = action.start

    def run(self, model: VideoModel) -> None:
        """Run the steps of the DENOISE, check that the latents are finite, and update the packet.

        Raises:
            ClipCancelledError: The clip was cancelled, or the partner has dropped it.
            NotFiniteError: A latent contains NaN or infinity.
        """
        context, action, packet = self._context, self._action, self._packet
        context.reporter.set_position(action, action.start)
        checks = StepChecks(context.device, context.rank, self._report_step)

        def after_step(step: int, latent: torch.Tensor) -> None:
            checks.add(step, latent)
            self._before_step(step + 1)

        self._before_step(action.start)
        partner = self if self._is_paired else None
        steps = action.start, action.end
        packet.tensors = model.denoise(packet.tensors, *steps, after_step, partner)
        checks.finish()
        packet.memory_pressure |= context.memory_pressure.has_occurred()
        # If two ranks share the guidance, both ranks have the same latent, and only the first rank
        # of the pair stores it.
        if self.branch == 0:
            self._keep_latent()

    def exchange(self, step: int, evaluate: Callable[[], Tensors]) -> Tensors:
        """Send this rank's prediction for a step to its partner; return the partner's prediction.

        Args:
            step: Index of the step.
            evaluate: Function that computes this rank's prediction, as tensors by name.

        Raises:
            MismatchError: The partner's tensors have other names, shapes or dtypes than this
                rank's.
            ClipCancelledError: The partner has dropped the clip.
        """
        context, clip = self._context, self._action.clip
        # Post the receive first, so that the prediction can arrive while this rank evaluates.
        pending = self._expected(step)
        tensors = evaluate()
        self._packet.memory_pressure |= context.memory_pressure.has_occurred()
        self._send(step, tensors)
        expected = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
        packet = self._arrived(step, pending, expected)
        self._packet.memory_pressure |= packet.memory_pressure
        self._next = None if packet.tombstone else step + 1
        if packet.tombstone:
            raise ClipCancelledError
        if context.tensor_store is not None:
            prediction = context.on_host(next(iter(packet.tensors.values())))
            name = f"step{step}_branch{1 - self.branch}"
            context.tensor_store.keep(clip, name, {PREDICTION: prediction})
        return packet.tensors

    def drop(self) -> None:
        """Tell the other rank of a pair to drop the clip, if it waits for a prediction.

        The message is a tombstone: a packet without tensors.
        """
        if not self._is_paired or self._next is None or self._next == self._action.end:
            return
        pending = self._expected(self._next)
        self._send(self._next, None)
        self._arrived(self._next, pending, None)

    def _expected(self, step: int) -> PendingPacket:
        clip, peer = self._action.clip, self._action.peer
        return self._context.transport.post_receive(clip, step, peer, "predictions")

    def _arrived(self, step: int, pending: PendingPacket, expected: Specs | None) -> Packet:
        # Heartbeats report that the rank waits. `ActionDone` counts this wait as a part of the
        # step, not in `waited`.
        self._context.reporter.set_position(self._action, step, waiting=True)
        packet = pending.wait(None if expected is None else lambda _: expected)
        self._context.reporter.set_position(self._action, step)
        return packet

    def _send(self, step: int, tensors: Tensors | None) -> None:
        packet = Packet(self._action.clip, step, 0.0, tensors or {}, tombstone=tensors is None)
        packet.memory_pressure = self._packet.memory_pressure
        self._context.transport.send(packet, self._action.peer, "predictions")

    def _before_step(self, step: int) -> None:
        """Raise a `ClipCancelledError` if the clip is cancelled; else report that `step` begins."""
        if step == self._action.end:
            return
        context, action = self._context, self._action
        context.check_not_cancelled(action.clip)
        context.reporter.set_position(action, step)

    def _report_step(self, step: int, seconds: float) -> None:
        done = StepDone(clip=self._action.clip, step=step, seconds=seconds)
        self._context.reporter.send(done)

    def _keep_latent(self) -> None:
        context, tensors = self._context, self._packet.tensors
        if context.tensor_store is not None:
            kept = {LATENTS: tensors[LATENTS], **solver_history(tensors)}
            on_host = {name: context.on_host(tensor) for name, tensor in kept.items()}
            context.tensor_store.keep(self._action.clip, f"step{self._action.end}", on_host)


class StepChecks:
    """Checks that the latent after each step of one DENOISE is finite.

    On CUDA, the result of a step's check is read after the next step has been queued. Reading it
    earlier would make the GPU wait for the CPU.

    Args:
        device: Device of the rank.
        rank: Number of the rank, for error messages.
        on_done: Callback for each step whose latent is finite. It gets the index of the step, and
            the seconds that the step took on the device.
    """

    def __init__(
        self, device: torch.device, rank: int, on_done: Callable[[int, float], None]
    ) -> None:
        self._device = device
        self._rank = rank
        self._on_done = on_done
        self._last = AsyncFlag(device)
        self._queued: deque[tuple[int, AsyncFlag, AsyncFlag]] = deque()

    def add(self, step: int, latent: torch.Tensor) -> None:
        """Start the check that the latent after `step` is finite; read results of earlier checks.

        Args:
            step: Index of the step.
            latent: Latent of any shape, on the rank's device.

        Raises:
            NotFiniteError: A latent of this or the previous step contains NaN or infinity.
        """
        now = AsyncFlag(self._device, torch.isfinite(latent).all())
        self._queued.append((step, self._last, now))
        self._last = now
        self._read(keep=1 if self._device.type == "cuda" else 0)

    def finish(self) -> None:
        """Wait for the checks of all latents; raise a `NotFiniteError` if a latent is not finite.

        Raises:
            NotFiniteError: A latent contains NaN or infinity.
        """
        self._read(keep=0)

    def _read(self, keep: int) -> None:
        while len(self._queued) > keep:
            step, before, after = self._queued.popleft()
            if not after.wait():
                raise NotFiniteError(
                    f"the latent is not finite after step {step} (computed by rank {self._rank})",
                    "check the weights, or use `dtype` bf16 or fp32, which have a larger range",
                    details={"step": step, "rank": self._rank},
                )
            self._on_done(step, after.seconds_since(before))
