"""The measured costs of clips by their size, because clips of one pipeline differ in size."""

from __future__ import annotations

import statistics
import threading
from collections import OrderedDict, defaultdict, deque
from dataclasses import replace
from typing import NamedTuple

from svdpp.config import SamplingConfig
from svdpp.plan.actions import Kind
from svdpp.plan.costs import PRESETS, Costs, PerRank
from svdpp.worker.messages import ActionDone, Event, StepDone, TransferDone

_MAX_SHAPES = 32
_MAX_SAMPLES = 128
_PRESET = "svd-xt-a100"
_STEP, _TRANSFER = "step", "transfer"
_MEASURED = (Kind.ENCODE, Kind.DECODE)


class _Shape(NamedTuple):
    height: int
    width: int
    frames: int
    guided: bool

    @property
    def volume(self) -> int:
        """What the time of a step is taken to be proportional to."""
        return self.height * self.width * self.frames * (2 if self.guided else 1)


# The preset is for clips of this size.
_PRESET_SHAPE = _Shape(576, 1024, 25, True)


class _Samples:
    """The latest seconds of one kind of work.

    The first time that a rank does it counts only while there is no other: it warms up.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self._first: float | None = None

    def add(self, seconds: float, *, is_first: bool) -> None:
        if is_first:
            self._first = seconds
        else:
            self._latest.append(seconds)

    def mean(self) -> float | None:
        return statistics.fmean(self._latest) if self._latest else self._first


class CostBook:
    """Mean costs of the latest sizes of clips; of an unknown size, scaled from the latest known.

    Args:
        assumed: costs of a clip of `sampling`, before a measurement; None: the preset of an A100.
        sampling: of the pipeline.
    """

    def __init__(self, assumed: Costs | None, sampling: SamplingConfig) -> None:
        self._is_given = assumed is not None
        self._assumed = PRESETS[_PRESET] if assumed is None else assumed
        self._assumed_shape = _PRESET_SHAPE if assumed is None else _shape(sampling)
        self._lock = threading.Lock()
        self._samples: OrderedDict[_Shape, defaultdict[str, _Samples]] = OrderedDict()
        self._warm: set[tuple[int, str]] = set()

    def begin(self) -> None:
        """Says that the ranks have been started, and must warm up."""
        with self._lock:
            self._warm.clear()

    def add(self, rank: int, event: Event, sampling: SamplingConfig) -> None:
        """Records an event about a clip of `sampling`; ignores events without a time."""
        found = _measured(event)
        if found is None:
            return
        what, seconds = found
        shape = _shape(sampling)
        with self._lock:
            samples = self._samples.setdefault(shape, defaultdict(_Samples))
            samples[what].add(seconds, is_first=(rank, what) not in self._warm)
            self._warm.add((rank, what))
            self._samples.move_to_end(shape)
            if len(self._samples) > _MAX_SHAPES:
                self._samples.popitem(last=False)

    @property
    def are_known(self) -> bool:
        """Whether costs are measured, or were given; those of an A100 say little about others."""
        with self._lock:
            return self._is_given or any(_STEP in each for each in self._samples.values())

    def costs(self, sampling: SamplingConfig) -> Costs:
        """The costs of a clip of `sampling`."""
        shape = _shape(sampling)
        with self._lock:
            for known in (shape, *reversed(self._samples)):
                samples = self._samples.get(known)
                if samples is not None and _STEP in samples:
                    means = {what: each.mean() for what, each in samples.items()}
                    return _scaled(self._measured(known, means), shape.volume / known.volume)
        return self._assumed_for(shape)

    def _measured(self, shape: _Shape, means: dict[str, float | None]) -> Costs:
        """The costs of `shape`; what is not measured is scaled by the time of a step."""
        assumed = self._assumed_for(shape)
        step = means[_STEP] or 0.0
        scale = step / assumed.step_on(0)

        def known(what: str, seconds: float) -> float:
            mean = means.get(what)
            return scale * seconds if mean is None else mean

        return Costs(
            step_seconds=max(step, 1e-9),
            encode_seconds=known(Kind.ENCODE, assumed.encode_on(0)),
            decode_seconds=known(Kind.DECODE, assumed.decode_on(0)),
            transfer_seconds=means.get(_TRANSFER) or 0.0,
        )

    def _assumed_for(self, shape: _Shape) -> Costs:
        return _scaled(self._assumed, shape.volume / self._assumed_shape.volume)


def _measured(event: Event) -> tuple[str, float] | None:
    """What the event measured, and its seconds; a transfer counts once, at its receiver."""
    match event:
        case StepDone():
            return _STEP, event.seconds
        case TransferDone(direction="recv"):
            return _TRANSFER, event.seconds
        case ActionDone():
            kind = event.action.kind
            # Of an image that was not prepared ahead, the clip also waits for that.
            seconds = event.end - event.start + event.waits.get("photograph", 0.0)
            return (str(kind), seconds) if kind in _MEASURED else None
        case _:
            return None


def _shape(sampling: SamplingConfig) -> _Shape:
    return _Shape(sampling.height, sampling.width, sampling.frames, sampling.guided)


def _scaled(costs: Costs, scale: float) -> Costs:
    """`costs` with other times of the device's work; transfers and all else stay."""
    return replace(
        costs,
        step_seconds=_times(costs.step_seconds, scale),
        encode_seconds=_times(costs.encode_seconds, scale),
        decode_seconds=_times(costs.decode_seconds, scale),
    )


def _times(value: PerRank, scale: float) -> PerRank:
    return tuple(each * scale for each in value) if isinstance(value, tuple) else value * scale
