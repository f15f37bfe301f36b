"""Faults that tests inject into ranks, by replacing functions in the ranks' processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from svdpp.comm import transport as link
from svdpp.comm.packet import FIELDS, Header, Packet
from svdpp.comm.transport import Transport
from svdpp.models.base import LATENTS, STRUCTURE, Tensors
from svdpp.models.video_model import VideoModel
from svdpp.plan.actions import Action
from svdpp.worker import rank as worker
from svdpp.worker.background import Reporter
from svdpp.worker.denoising import Denoising
from svdpp.worker.stage import PipelineStage
from svdpp.worker.tensor_files import solver_history


def one_ulp_off(latent: torch.Tensor) -> torch.Tensor:
    """Return a copy of `latent` whose middle element is the next larger number of the dtype."""
    changed = latent.clone().contiguous()
    middle = changed.view(-1)[changed.numel() // 2]
    middle.copy_(torch.nextafter(middle, torch.full_like(middle, torch.inf)))
    return changed


#: Number of bytes that no machine can allocate.
TOO_MUCH = 2**58


def ask_for_too_much() -> torch.Tensor:
    """Request more memory than exists, so that torch's CPU allocator raises its own error."""
    return torch.empty(TOO_MUCH, dtype=torch.uint8)


def damaged_packets(field: str, packet: Packet) -> list[Packet]:
    """Return the packets that a faulty rank sends instead of `packet`: changed, none, or twice.

    Args:
        field: Kind of damage; see the cases below.
        packet: Packet that the rank would send.
    """
    tensors = dict(packet.tensors)
    latent = tensors[LATENTS]
    last = [name for name in tensors if name != STRUCTURE][-1]
    match field:
        case "width":
            tensors[LATENTS] = latent[..., :-1]
        case "dtype":
            tensors[LATENTS] = latent.to(torch.bfloat16)
        case "missing":
            del tensors[last]
        case "extra":
            tensors["extra"] = latent[:1]
        case "step":
            return [replace(packet, next_step=packet.next_step + 1)]
        case "skipped":
            return []
        case "twice":
            return [packet, packet]
    return [replace(packet, tensors=tensors)]


@dataclass(frozen=True)
class Damage:
    """Fault that a test injects at one rank and clip.

    The object is pickled and sent to every rank, and each rank calls it when it starts.

    Kinds: `hang` hangs at `place` until the file `until` exists (without `until`, forever), while
    heartbeats continue. `raise` raises an error at `place`, after the file `until` exists (without
    `until`, at once). `ulp` increases one element of a latent by one unit in the last place before
    the rank sends the latent. `state` increases an element of a multistep solver's history in the
    same way, and `prediction` an element of the first prediction that a rank of a CFG pair sends.
    `skip` omits one of the rank's steps of the clip. `nan` fills the latent that the rank receives
    with NaN. `header` changes the field `field` of the header that the rank sends. `memory`
    requests more memory than any machine has, at `place`. `packet` damages the packet that the rank
    sends; `field` is the kind of damage (see `damaged_packets` and `_damage_payload`).

    Places before the first clip: `start` (before the rank's first report) and `load` (while the
    model is loaded). Places in the clip `clip`: `step<k>` (before step k, from 0), `step` (before
    the clip's first step on this rank), or the name of an action, such as `decode`.
    """

    kind: str
    rank: int
    clip: int
    field: str = ""
    place: str = "step"
    until: str = ""

    def __call__(self, rank: int) -> None:
        self.reach(rank, -1, "start")
        self._watch_places(rank)
        self._damage_steps(rank)
        if self.kind == "header" and rank == self.rank:
            self._damage_headers()
        if self.kind == "memory" and self.place == "load" and rank == self.rank:
            worker.load_rank_model = lambda *_, **__: ask_for_too_much()  # type: ignore[assignment]
        if self.kind == "packet" and rank == self.rank:
            self._damage_packets()

    def strikes(self, kind: str, rank: int, clip: int) -> bool:
        """Return whether the fault is of the given kind, and at the given rank and clip."""
        return (self.kind, self.rank, self.clip) == (kind, rank, clip)

    def is_at(self, rank: int, clip: int, place: str) -> bool:
        """Return whether the injected fault acts at the given rank, clip and place."""
        own_clip = clip if place in ("start", "load") else self.clip
        is_place = place == self.place or (self.place == "step" and place.startswith("step"))
        return is_place and (rank, clip) == (self.rank, own_clip)

    def reach(self, rank: int, clip: int, place: str) -> None:
        """Hang, raise or use up memory if the fault acts at the place that a rank has reached."""
        if self.kind not in ("hang", "raise", "memory") or not self.is_at(rank, clip, place):
            return
        if self.kind == "memory" and place != "load":
            ask_for_too_much()
        is_awaited = bool(self.until) or self.kind == "hang"
        while is_awaited and not (self.until and Path(self.until).exists()):
            time.sleep(0.02)
        if self.kind == "raise":
            raise RuntimeError("an injected fault")

    def _watch_places(self, rank: int) -> None:
        phase, run, before = Reporter.set_phase, PipelineStage.run, Denoising._before_step

        def phase_watched(reporter: Reporter, name: str, *args: Any, **more: Any) -> None:
            phase(reporter, name, *args, **more)
            if name == "loading the model":
                self.reach(rank, -1, "load")

        def run_watched(stage: PipelineStage, action: Action) -> None:
            stage._reporter.set_position(action)
            self.reach(rank, action.clip, action.kind.lower())
            run(stage, action)

        def before_step_watched(denoising: Denoising, step: int) -> None:
            before(denoising, step)
            if step != denoising._action.end:
                self.reach(rank, denoising._action.clip, f"step{step}")

        Reporter.set_phase = phase_watched  # type: ignore[method-assign]
        PipelineStage.run = run_watched  # type: ignore[method-assign]
        Denoising._before_step = before_step_watched  # type: ignore[method-assign]

    def _damage_steps(self, rank: int) -> None:
        run, exchange = Denoising.run, Denoising.exchange

        def damaged_run(denoising: Denoising, model: VideoModel) -> None:
            denoise = partial(self._denoise, model, (rank, denoising._action.clip))
            run(denoising, SimpleNamespace(denoise=denoise))  # type: ignore[arg-type]

        def damaged_exchange(
            denoising: Denoising, step: int, evaluate: Callable[[], Tensors]
        ) -> Tensors:
            is_struck = self.strikes("prediction", rank, denoising._action.clip)
            if not is_struck or step != denoising._action.start:
                return exchange(denoising, step, evaluate)
            return exchange(
                denoising, step, lambda: {name: one_ulp_off(t) for name, t in evaluate().items()}
            )

        Denoising.run = damaged_run  # type: ignore[method-assign]
        Denoising.exchange = damaged_exchange  # type: ignore[method-assign]

    def _denoise(
        self, model: VideoModel, place: Any, tensors: Tensors, start: int, end: int, *rest: Any
    ) -> Tensors:
        if self.strikes("nan", *place):
            tensors = {**tensors, LATENTS: torch.full_like(tensors[LATENTS], torch.nan)}
        if self.strikes("skip", *place):
            # The rank's first step is omitted, except on the first rank. There the solver must
            # begin with step 0, so the last step is omitted.
            start, end = (start + 1, end) if start else (start, end - 1)
        tensors = model.denoise(tensors, start, end, *rest)
        name = LATENTS
        if self.strikes("state", *place):
            name = next(iter(solver_history(tensors)))
        elif not self.strikes("ulp", *place):
            return tensors
        return {**tensors, name: one_ulp_off(tensors[name])}

    def _damage_packets(self) -> None:
        send, held, sending = Transport.send, list[Packet](), SimpleNamespace(clip=-1)
        self._damage_payload(sending)

        def damaged(transport: Transport, packet: Packet, peer: int, channel: Any) -> None:
            if packet.clip == self.clip and self.field == "swapped":
                held.append(packet)
                return
            packets = [packet]
            if packet.clip == self.clip:
                packets = damaged_packets(self.field, packet)
            for each in (*packets, *held):
                sending.clip = each.clip
                send(transport, each, peer, channel)
            held.clear()

        Transport.send = damaged  # type: ignore[method-assign, assignment]

    def _damage_payload(self, sending: SimpleNamespace) -> None:
        """Make a rank send a payload with missing bytes or a changed one, or another clip's index.

        The payload is changed after the checksum is computed, and the index after the sender has
        compared it with the plan.
        """
        flatten, pack, payloads = link.flatten, link.pack_metadata, list[torch.Tensor]()

        def flatten_damaged(tensors: Tensors, device: torch.device) -> torch.Tensor:
            payload = flatten(tensors, device)
            payloads[:] = [payload]
            is_shorter = self.field == "bytes" and sending.clip == self.clip
            return payload[:-4] if is_shorter else payload

        def pack_damaged(packet: Packet, *rest: Any) -> bytes:
            if self.field == "payload" and packet.clip == self.clip:
                payloads[0][0] ^= 1
            if self.field == "clip" and packet.clip == self.clip:
                packet = replace(packet, clip=packet.clip + 1)
            return pack(packet, *rest)

        link.flatten = flatten_damaged  # type: ignore[assignment]
        link.pack_metadata = pack_damaged

    def _damage_headers(self) -> None:
        send, pack, now = Transport._send, Header.pack, threading.local()

        def noting(transport: Transport, link: Any, packet: Packet, *rest: Any) -> None:
            now.clip = packet.clip
            send(transport, link, packet, *rest)

        def damaged(header: Header) -> bytes:
            data = bytearray(pack(header))
            data[FIELDS[self.field]] ^= 8 if now.clip == self.clip else 0
            return bytes(data)

        Transport._send = noting  # type: ignore[method-assign]
        Header.pack = damaged  # type: ignore[method-assign]
