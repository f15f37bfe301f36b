"""How fast each rank computes: the FLOPs of its latest work over the seconds of that."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import NamedTuple

from loguru import logger

from svdpp.config import ModelConfig, SamplingConfig
from svdpp.diagnostics.utilisation import PartFlops, Utilisation, achieved
from svdpp.errors import RequestError
from svdpp.launch.gpus import visible_gpus
from svdpp.plan.actions import Kind
from svdpp.serve.gate import shape_only
from svdpp.serve.helper_process import helper_command, helper_environment
from svdpp.worker.messages import ActionDone, Event, Started, StepDone

# Steps, encodes and decodes that count: those of the last few clips.
_LATEST = 256
# Sizes of clips whose FLOPs are counted, and the longest time for one.
_MAX_SIZES = 64
_SECONDS = 600.0
_PARTS: Mapping[Kind, str] = {Kind.ENCODE: "encode", Kind.DECODE: "decode"}

#: Counts FLOPs; None if that failed. It may take seconds.
Count = Callable[[ModelConfig, SamplingConfig], PartFlops | None]


def count_in_process(model: ModelConfig, sampling: SamplingConfig) -> PartFlops | None:
    """Counts in another process, of low priority: this one must not import diffusers."""
    # The ranks have loaded the model, so nothing needs to be downloaded.
    asked = {"model": asdict(replace(model, local_files_only=True)), "sampling": asdict(sampling)}
    try:
        done = subprocess.run(
            helper_command("svdpp.serve.count_flops", str(os.getpid())),
            input=json.dumps(asked).encode(),
            capture_output=True,
            timeout=_SECONDS,
            check=True,
            env=helper_environment(),
            cwd="/",
        )
        return PartFlops(**json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, LookupError, ValueError, TypeError) as error:
        logger.warning("the FLOPs of a clip could not be counted: {}", error)
        return None


class FlopCounts:
    """The FLOPs of clips, counted in the background the first time that they are asked for.

    Any thread may call it.
    """

    def __init__(self, model: ModelConfig, count: Count = count_in_process) -> None:
        self._model = model
        self._count = count
        self._lock = threading.Lock()
        self._known: dict[SamplingConfig, PartFlops | None] = {}
        self._is_counting = False

    def of(self, sampling: SamplingConfig) -> PartFlops | None:
        """The FLOPs of a clip of `sampling`; None if they are not known, or not yet."""
        if self._model.is_dummy:
            return None
        size = shape_only(sampling)
        with self._lock:
            if size in self._known or self._is_counting or len(self._known) >= _MAX_SIZES:
                return self._known.get(size)
            self._is_counting = True
        threading.Thread(target=self._learn, args=(size,), name="flops", daemon=True).start()
        return None

    def _learn(self, size: SamplingConfig) -> None:
        flops = self._count(self._model, size)
        with self._lock:
            self._known[size] = flops
            self._is_counting = False


class _Work(NamedTuple):
    sampling: SamplingConfig
    part: str
    """A field of `PartFlops`."""
    seconds: float


class RankSpeeds:
    """Collects the latest work of each rank. One thread adds events, any thread reads."""

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
