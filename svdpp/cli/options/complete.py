"""Names that a shell completes; otherwise it completes paths."""

from __future__ import annotations

from svdpp.config import DEFAULT_MODEL, DEMO_MODELS, DUMMY_MODEL, SAMPLING_CLASSES
from svdpp.plan.costs import PRESETS


def families(incomplete: str) -> list[str]:
    """Return families of models for a shell.

    Args:
        incomplete: Beginning of the value, as typed so far.
    """
    return [name for name in SAMPLING_CLASSES if name.startswith(incomplete)]


def families_and_demos(incomplete: str) -> list[str]:
    """Return families of models and the demos for a shell.

    Args:
        incomplete: Beginning of the value, as typed so far.
    """
    known = (*SAMPLING_CLASSES, *DEMO_MODELS)
    return [name for name in known if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Return the built-in models and the default one for a shell.

    Args:
        incomplete: Beginning of the value, as typed so far.
    """
    known = (*DEMO_MODELS, DUMMY_MODEL, DEFAULT_MODEL)
    return [name for name in known if name.startswith(incomplete)]


def presets(incomplete: str) -> list[str]:
    """Return published costs for a shell.

    Args:
        incomplete: Beginning of the value, as typed so far.
    """
    return [name for name in PRESETS if name.startswith(incomplete)]


def devices(incomplete: str) -> list[str]:
    """Return devices for a shell.

    Args:
        incomplete: Beginning of the value, as typed so far.
    """
    return [name for name in ("auto", "cuda", "cpu") if name.startswith(incomplete)]


def configurations(incomplete: str) -> list[str]:
    """Return the configurations of benchmarks that come with svdpp for a shell.

    Args:
        incomplete: Beginning of the value, as typed so far.
    """
    from svdpp.bench.config import shipped

    return [name for name in shipped() if name.startswith(incomplete)]
