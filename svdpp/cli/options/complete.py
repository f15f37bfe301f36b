"""Completion of values in a shell. Without a match the shell completes paths."""

from __future__ import annotations

from svdpp.config import DEFAULT_MODEL, DEMO_MODELS, DUMMY_MODEL, SAMPLING_CLASSES
from svdpp.plan.costs import PRESETS


def families(incomplete: str) -> list[str]:
    """Return the families of models whose names begin with the typed text.

    Args:
        incomplete: Text that the user has typed so far.
    """
    return [name for name in SAMPLING_CLASSES if name.startswith(incomplete)]


def families_and_demos(incomplete: str) -> list[str]:
    """Return the families and demo models whose names begin with the typed text.

    Args:
        incomplete: Text that the user has typed so far.
    """
    known = (*SAMPLING_CLASSES, *DEMO_MODELS)
    return [name for name in known if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Return the built-in models and the default model whose names begin with the typed text.

    Args:
        incomplete: Text that the user has typed so far.
    """
    known = (*DEMO_MODELS, DUMMY_MODEL, DEFAULT_MODEL)
    return [name for name in known if name.startswith(incomplete)]


def presets(incomplete: str) -> list[str]:
    """Return the names of published costs, for `--costs`, that begin with the typed text.

    Args:
        incomplete: Text that the user has typed so far.
    """
    return [name for name in PRESETS if name.startswith(incomplete)]


def devices(incomplete: str) -> list[str]:
    """Return the values of `--device` that begin with the typed text.

    Args:
        incomplete: Text that the user has typed so far.
    """
    return [name for name in ("auto", "cuda", "cpu") if name.startswith(incomplete)]


def configurations(incomplete: str) -> list[str]:
    """Return the shipped benchmark configurations whose names begin with the typed text.

    Args:
        incomplete: Text that the user has typed so far.
    """
    from svdpp.bench.config import shipped

    return [name for name in shipped() if name.startswith(incomplete)]
