"""Owns how fast each rank computes: the FLOPs of its latest work over the seconds of that."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import NamedTuple

from svdpp.config import ModelConfig, SamplingConfig
from svdpp.diagnostics.utilisation import Utilisation, achieved
from svdpp.errors import RequestError
from svdpp.launch.gpus import visible_gpus
from svdpp.plan.actions import Kind
from svdpp.serve.flop_counts import FlopCounts
from svdpp.worker.messages import ActionDone, Event, Started, StepDone

# Steps, encodes and decodes that count: those of the last few clips.
_LATEST = 256
_PARTS: Mapping[Kind, str] = {Kind.ENCODE: "encode", Kind.DECODE: "decode"}


class _Work(NamedTuple):
    sampling: SamplingConfig
    part: str
    """A field of `PartFlops`."""
    seconds: float


class RankSpeeds:
    """Collects the latest work of each rank. One thread adds events, any thread reads.

    Args:
        model: of the clips.
        flops: of clips by their size; None: counted in the background.
    """

    def __init__(self, model: ModelConfig, flops: FlopCounts | None = None) -> None:
        self._dtype = model.dtype
        self._flops = flops or FlopCounts(model)
        self._lock = threading.Lock()
        self._work: defaultdict[int, deque[_Work]] = defaultdict(lambda: deque(maxlen=_LATEST))
        self._uuids: dict[int, str | None] = {}

    def add(self, rank: int, event: Event, sampling: SamplingConfig | None) -> None:
        """Records an event about a clip of `sampling`, or about none."""
        with self._lock:
            match event:
                case Started():
                    self._uuids[rank] = event.uuid
                case StepDone() if sampling is not None:
                    self._work[rank].append(_Work(sampling, "step", event.seconds))
                case ActionDone() if sampling is not None:
                    part = _PARTS.get(event.action.kind)
                    if part is not None:
                        seconds = event.end - event.start
                        self._work[rank].append(_Work(sampling, part, seconds))
                case _:
                    pass

    def read(self) -> list[Utilisation]:
        """The utilisation of each rank whose latest work has known FLOPs."""
        with self._lock:
            work = {rank: list(each) for rank, each in sorted(self._work.items())}
            uuids = dict(self._uuids)
        samplings = {each.sampling for latest in work.values() for each in latest}
        flops = {sampling: self._flops.of(sampling) for sampling in samplings}
        names = _device_names(uuids)
        found = []
        for rank, latest in work.items():
            known = [(flops[each.sampling], each) for each in latest]
            counted = [(parts, each) for parts, each in known if parts is not None]
            seconds = sum(each.seconds for _, each in counted)
            if seconds > 0:
                done = sum(getattr(parts, each.part) for parts, each in counted)
                found.append(achieved(rank, done, seconds, names.get(rank, ""), self._dtype))
        return found


def _device_names(uuids: Mapping[int, str | None]) -> dict[int, str]:
    """The products of the ranks' GPUs; those of other hosts are not known."""
    if not any(uuids.values()):
        return {}
    with contextlib.suppress(RequestError):  # MIG slices
        gpus = visible_gpus()
        return {
            rank: gpu.name
            for rank, uuid in uuids.items()
            for gpu in gpus
            if uuid and gpu.uuid.endswith(uuid)
        }
    return {}
