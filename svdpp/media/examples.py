"""Owns the example inputs of the package: photographs and a prompt."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent / "assets" / "photos"

#: For the proof of a model that takes prompts.
EXAMPLE_PROMPT = "a rowing boat drifts on a calm lake"


def example_photos() -> list[Path]:
    """Four photographs, sorted by name; the README in their folder gives their origin."""
    return sorted(_FOLDER.glob("*.jpg"))
