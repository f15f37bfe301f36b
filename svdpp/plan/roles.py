"""`Roles`: the parts of the model that a rank uses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Parts of the model that a rank uses. A rank does not load the other parts."""

    encode: bool = False
    denoise: bool = False
    decode: bool = False
    experts: frozenset[int] = frozenset()
    """Denoisers that the rank's steps need, as indices in `EXPERTS`. If the model has only one
    denoiser, this is {0}, or empty if the rank runs no steps."""

    def __post_init__(self) -> None:
        if self.denoise and not self.experts:
            object.__setattr__(self, "experts", frozenset({0}))

    def by_part(self) -> list[Roles]:
        """Return one `Roles` for each part of the model that the rank uses.

        Each denoiser of the rank is a part.
        """
        experts = [Roles(denoise=True, experts=frozenset({each})) for each in sorted(self.experts)]
        return [Roles(encode=True)] * self.encode + experts + [Roles(decode=True)] * self.decode

    @property
    def part_names(self) -> list[str]:
        """Names of the rank's parts: `encode`, `denoise` (once for each denoiser), `decode`."""
        return ["encode"] * self.encode + ["denoise"] * len(self.experts) + ["decode"] * self.decode
