"""`Tolerance`: the difference from the reference that a verification allows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from svdpp.config.limits import require


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Allowed difference of an element of a clip: atol + rtol * abs(expected), as in torch.testing.

    Frames and audio are compared as fractions of their largest possible value. For frames, this
    value is 255, so 1/255 is one level of a pixel. If `atol` and `rtol` are 0, the bits must be
    equal.

    Args:
        atol: Absolute tolerance: for frames and audio as a fraction of their largest possible
            value, for latents in the unit of the latent.
        rtol: Tolerance as a fraction of the expected value.

    Raises:
        RequestError: `atol` or `rtol` is negative or not finite.
    """

    atol: float = 0.0
    rtol: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("atol", self.atol), ("rtol", self.rtol)):
            is_valid = math.isfinite(value) and value >= 0
            message = f"`{name}` must be a finite number that is not negative, got {value}"
            require(is_valid, message, **{name: str(value)})

    @property
    def is_bitwise(self) -> bool:
        """Whether the tolerance allows no difference, so that all bits must be equal."""
        return self.atol == 0 and self.rtol == 0

    def __str__(self) -> str:
        return f"atol {self.atol:g}, rtol {self.rtol:g}"


BITWISE = Tolerance()
