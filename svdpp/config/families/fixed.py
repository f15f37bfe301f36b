"""Check of sampling parameters that a family does not let a user choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from svdpp.config.limits import require


def check_fixed(sampling: Any, reasons: Mapping[str, str]) -> None:
    """Raise a `RequestError` unless the sampling parameters in `reasons` have their defaults.

    Args:
        sampling: Sampling parameters.
        reasons: Parameters to check: the name of each, and why it can have only its default.

    Raises:
        RequestError: A parameter in `reasons` does not have its default.
    """
    for name, reason in reasons.items():
        value, only = getattr(sampling, name), getattr(type(sampling), name)
        require(
            value == only,
            f"`{name}` must be {only}, got {value}: {reason}",
            "leave it out",
            field=name,
            value=value,
            expected=only,
        )
