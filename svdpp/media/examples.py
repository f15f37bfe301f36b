"""Owns the photographs that come with the package, for trying it without one's own."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent / "assets" / "photos"


def example_photos() -> list[Path]:
    """Four photographs, sorted by name; their origin stands in the README beside them."""
    return sorted(_FOLDER.glob("*.jpg"))
