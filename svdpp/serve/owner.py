"""Owns the Owner: whose jobs a request is about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Owner:
    """Whose jobs a request is about.

    Args:
        name: of the API key; empty without keys.
        max_open: jobs that may be queued or in progress; None: no limit.
    """

    name: str = ""
    max_open: int | None = None
