"""Owns the example photographs of the package."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent / "assets" / "photos"


def example_photos() -> list[Path]:
    """Four photographs, sorted by name; the README in their folder gives their origin."""
    return sorted(_FOLDER.glob("*.jpg"))
