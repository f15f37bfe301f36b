"""SVD's entry in the list of families; see `models.families.Family`."""

from __future__ import annotations

from typing import Any

from svdpp.models.loading import check_components
from svdpp.models.svd.checkpoint import SvdCheckpoint
from svdpp.models.svd.load import CLASSES, feature_extractor_name
from svdpp.models.svd.model import load_svd as load_model
from svdpp.models.svd.reference import SvdReference as load_reference

__all__ = ["check_weights", "conditions", "load_model", "load_reference"]


def check_weights(checkpoint: SvdCheckpoint) -> int:
    """See `models.families.Family`."""
    return check_components(checkpoint, CLASSES)


def conditions(checkpoint: SvdCheckpoint) -> dict[str, Any]:
    """The class of the feature extractor, which depends on the installed libraries."""
    return {"feature_extractor": feature_extractor_name(checkpoint)}
