"""Names that a shell completes; where none fits, the shell completes paths."""

from __future__ import annotations

from svdpp.config import DEFAULT_MODEL, DEMO_MODEL, DUMMY_MODEL, SAMPLING_CLASSES
from svdpp.plan.costs import PRESETS


def families(incomplete: str) -> list[str]:
    """Return the families of models that begin so."""
    return [name for name in SAMPLING_CLASSES if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Return the built-in models and the default one, if they begin so."""
    known = (DEMO_MODEL, DUMMY_MODEL, DEFAULT_MODEL)
    return [name for name in known if name.startswith(incomplete)]


def presets(incomplete: str) -> list[str]:
    """Return the published costs that begin so."""
    return [name for name in PRESETS if name.startswith(incomplete)]


def devices(incomplete: str) -> list[str]:
    """Return the devices that begin so."""
    return [name for name in ("auto", "cuda", "cpu") if name.startswith(incomplete)]


def configurations(incomplete: str) -> list[str]:
    """Return the configurations of benchmarks that come with svdpp and begin so."""
    from svdpp.bench.config import shipped

    return [name for name in shipped() if name.startswith(incomplete)]
