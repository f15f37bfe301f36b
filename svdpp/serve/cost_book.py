"""Owns the measured costs of clips by their size, because clips of one pipeline differ in size."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from typing import NamedTuple

from svdpp.config import SamplingConfig
from svdpp.driver.trace import MeanCosts
from svdpp.plan.costs import Costs, PerRank
from svdpp.plan.presets import PRESETS
from svdpp.worker.messages import Event

_MAX_SHAPES = 32
_PRESET = "svd-xt-a100"


class _Shape(NamedTuple):
    height: int
    width: int
    frames: int
    guided: bool

    @property
    def volume(self) -> int:
        """What a step's time is taken to be proportional to."""
        return self.height * self.width * self.frames * (2 if self.guided else 1)


# The preset is for clips of this size.
_PRESET_SHAPE = _Shape(576, 1024, 25, True)


class CostBook:
    """Mean costs of the latest sizes of clips; of an unknown size, scaled from the latest known.

    Args:
        assumed: costs of a clip of `sampling`, before a measurement; None: the preset of an A100.
        sampling: of the pipeline.
    """

    def __init__(self, assumed: Costs | None, sampling: SamplingConfig) -> None:
        self._assumed = PRESETS[_PRESET] if assumed is None else assumed
        self._assumed_shape = _PRESET_SHAPE if assumed is None else _shape(sampling)
        self._lock = threading.Lock()
        self._means: OrderedDict[_Shape, MeanCosts] = OrderedDict()

    def add(self, event: Event, sampling: SamplingConfig) -> None:
        """Records an event about a clip of `sampling`; ignores events without a time."""
        shape = _shape(sampling)
        with self._lock:
            means = self._means.setdefault(shape, MeanCosts())
            means.add(event)
            self._means.move_to_end(shape)
            if len(self._means) > _MAX_SHAPES:
                self._means.popitem(last=False)

    def costs(self, sampling: SamplingConfig) -> Costs:
        """The costs of a clip of `sampling`."""
        shape = _shape(sampling)
        assumed = _scaled(self._assumed, shape.volume / self._assumed_shape.volume)
        with self._lock:
            means = self._means.get(shape)
            if means is not None and means.has_stepped:
                return means.costs_like(assumed)
            for other in reversed(self._means):
                if self._means[other].has_stepped:
                    scale = shape.volume / other.volume
                    known = self._means[other].costs_like(_scaled(assumed, 1 / scale))
                    return _scaled(known, scale)
        return assumed


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
