"""Faults that only tests inject into a rank's work on a clip."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from svdpp.comm.packet import FIELDS
from svdpp.models.base import LATENTS, Tensors
from svdpp.worker.fault_injection import InjectedFault, one_ulp_off
from svdpp.worker.tensor_store import solver_history


@dataclass(frozen=True)
class Damage(InjectedFault):
    """One fault, at one rank and clip.

    Beside `InjectedFault`'s kinds: `state` changes the history of a multistep solver that leaves
    the rank by one ULP, `prediction` the first prediction that a rank of a pair sends; `raise`
    raises before the rank's first step of the clip; `hang` hangs there; `nan` fills the latent that
    enters the rank with NaN; `header` changes `field` of the header that the rank sends.
    """

    field: str = ""

    def skipped_steps(self, rank: int, clip: int, partner: int) -> int:
        if self.strikes("raise", rank, clip):
            raise RuntimeError("an injected fault")
        while self.strikes("hang", rank, clip):
            time.sleep(1)
        return super().skipped_steps(rank, clip, partner)

    def received(self, rank: int, clip: int, tensors: Tensors) -> Tensors:
        if self.strikes("nan", rank, clip):
            return {**tensors, LATENTS: torch.full_like(tensors[LATENTS], torch.nan)}
        return tensors

    def sent(self, rank: int, clip: int, tensors: Tensors, partner: int) -> Tensors:
        if self.strikes("state", rank, clip):
            name = next(iter(solver_history(tensors)))
            return {**tensors, name: one_ulp_off(tensors[name])}
        return super().sent(rank, clip, tensors, partner)

    def predicted(self, rank: int, clip: int, tensors: Tensors) -> Tensors:
        if not self.strikes("prediction", rank, clip):
            return tensors
        return {name: one_ulp_off(tensor) for name, tensor in tensors.items()}

    def tamper(self, rank: int) -> Callable[[int, bytes], bytes] | None:
        if self.kind != "header" or rank != self.rank:
            return None
        position = FIELDS[self.field]

        def change(clip: int, header: bytes) -> bytes:
            changed = bytearray(header)
            changed[position] ^= 8 if clip == self.clip else 0
            return bytes(changed)

        return change
