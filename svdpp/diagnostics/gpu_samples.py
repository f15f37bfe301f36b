"""The sums over a GPU's samples: mean, peak and energy, in constant memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from svdpp.diagnostics.figures import GpuFigures
from svdpp.worker.messages import GpuSample

# A GPU with less load than this may lower its clock because it has no work.
_BUSY = 0.5


@dataclass
class _Mean:
    total: float = 0.0
    count: int = 0
    peak: float | None = None

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1
            self.peak = value if self.peak is None else max(self.peak, value)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class GpuSums:
    """Adds up the samples of one rank's GPU, which come at equal intervals."""

    _utilisation: _Mean = field(default_factory=_Mean)
    _memory: _Mean = field(default_factory=_Mean)
    _watts: _Mean = field(default_factory=_Mean)
    _celsius: _Mean = field(default_factory=_Mean)
    _clock: _Mean = field(default_factory=_Mean)
    _throttled: Counter[str] = field(default_factory=Counter)
    _samples: int = 0
    _first: GpuSample | None = None
    _last: GpuSample | None = None
    _joules_by_power: float = 0.0

    def add(self, sample: GpuSample) -> None:
        """Adds a sample."""
        self._samples += 1
        self._utilisation.add(sample.utilisation)
        self._memory.add(sample.memory_bytes)
        self._watts.add(sample.watts)
        self._celsius.add(sample.celsius)
        if sample.utilisation is None or sample.utilisation >= _BUSY:
            self._clock.add(sample.sm_mhz)
        self._throttled.update(sample.throttled)
        before = self._last
        if before is not None and before.watts is not None and sample.watts is not None:
            # The trapezoidal rule.
            mean = (before.watts + sample.watts) / 2
            self._joules_by_power += mean * (sample.when - before.when)
        self._first, self._last = self._first or sample, sample

    def figures(self) -> GpuFigures | None:
        """Mean, peak and energy so far; None without a sample."""
        if not self._samples:
            return None
        memory = self._memory.peak
        return GpuFigures(
            samples=self._samples,
            mean_utilisation=self._utilisation.mean,
            peak_utilisation=self._utilisation.peak,
            peak_memory_bytes=None if memory is None else int(memory),
            mean_watts=self._watts.mean,
            peak_watts=self._watts.peak,
            peak_celsius=self._celsius.peak,
            mean_sm_mhz=self._clock.mean,
            peak_sm_mhz=self._clock.peak,
            joules=self._joules(),
            throttled={name: count / self._samples for name, count in self._throttled.items()},
        )

    def _joules(self) -> float | None:
        """The GPU's own energy counter if it has one, else its power summed up over time."""
        assert self._first is not None
        assert self._last is not None
        first, last = self._first.joules, self._last.joules
        if first is not None and last is not None and last >= first:
            return last - first
        return self._joules_by_power if self._watts.count > 1 else None
