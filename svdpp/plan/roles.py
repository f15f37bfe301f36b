"""Parts of the model that a rank uses: encode, steps and decode."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The parts of the model that a rank uses; it does not load the others."""

    encode: bool = False
    denoise: bool = False
    decode: bool = False
    experts: frozenset[int] = frozenset()
    """The denoisers that its steps need, by index in `EXPERTS`; of a model with one, number 0."""

    def __post_init__(self) -> None:
        if self.denoise and not self.experts:
            object.__setattr__(self, "experts", frozenset({0}))

    def by_part(self) -> list[Roles]:
        """Return roles of one part each, for the rank's parts; each expert is a part."""
        experts = [Roles(denoise=True, experts=frozenset({each})) for each in sorted(self.experts)]
        return [Roles(encode=True)] * self.encode + experts + [Roles(decode=True)] * self.decode

    @property
    def part_names(self) -> list[str]:
        """Names of the rank's parts: `encode`, `denoise` once for each expert, `decode`."""
        return ["encode"] * self.encode + ["denoise"] * len(self.experts) + ["decode"] * self.decode
