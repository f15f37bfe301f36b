"""List of all model families, with look-up by the name of a family or of a pipeline class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from svdpp.config.families import (
    allegro,
    cogvideox,
    cosmos3,
    echo,
    framepack,
    helios,
    hunyuan_video,
    hunyuan_video_15,
    kandinsky5,
    kandinsky6,
    latte,
    ltx,
    ltx2,
    minimax_h3,
    mochi,
    sana_video,
    skyreels_v2,
    svd,
    wan,
)
from svdpp.config.families.spec import FamilySpec
from svdpp.config.limits import check_choice, require, shown
from svdpp.config.sampling import PromptedSampling, params_of
from svdpp.errors import RequestError

#: Specs of all families, in the order in which `svdpp models` lists them.
_SPECS: tuple[FamilySpec, ...] = (
    *svd.FAMILIES,
    *wan.FAMILIES,
    *ltx.FAMILIES,
    *ltx2.FAMILIES,
    *echo.FAMILIES,
    *minimax_h3.FAMILIES,
    *hunyuan_video.FAMILIES,
    *framepack.FAMILIES,
    *helios.FAMILIES,
    *hunyuan_video_15.FAMILIES,
    *cogvideox.FAMILIES,
    *skyreels_v2.FAMILIES,
    *kandinsky5.FAMILIES,
    *kandinsky6.FAMILIES,
    *mochi.FAMILIES,
    *allegro.FAMILIES,
    *latte.FAMILIES,
    *sana_video.FAMILIES,
    *cosmos3.FAMILIES,
)

#: Spec of each family, by name.
FAMILY_SPECS: Mapping[str, FamilySpec] = {spec.name: spec for spec in _SPECS}


def _families_by_pipeline() -> dict[str, str]:
    families: dict[str, str] = {}
    for spec in _SPECS:
        for pipeline in (spec.text_pipeline, spec.image_pipeline):
            if pipeline is not None and pipeline not in spec.aliases:
                families[pipeline] = spec.name
    for spec in _SPECS:
        for alias in spec.aliases:
            families.setdefault(alias, spec.name)
    return families


#: Name of the family that runs a checkpoint by default, by the checkpoint's pipeline class.
FAMILY_OF_PIPELINE: Mapping[str, str] = _families_by_pipeline()

#: Class of each family's sampling parameters, by the name of the family.
SAMPLING_CLASSES: Mapping[str, type[Any]] = {spec.name: spec.sampling for spec in _SPECS}

#: Sampling parameters of any family; their field `family` names the family.
if TYPE_CHECKING:
    SamplingConfig = svd.SvdSampling | PromptedSampling
else:  # pydantic leaves the value as it is; `worker.messages` creates the class of the family
    SamplingConfig = Any


#: Names of the families whose pipelines take a last image. Nevertheless, some checkpoints of these
#: families take no last image.
LAST_IMAGE_FAMILIES = tuple(
    name for name, spec in FAMILY_SPECS.items() if spec.last_image_arguments is not None
)


def check_takes_last_image(family: str) -> None:
    """Raise a `RequestError` unless a family takes a last image, which is the clip's last frame.

    Raises:
        RequestError: The pipeline takes no last image; the hint names the families that take one.
    """
    if family not in LAST_IMAGE_FAMILIES:
        raise RequestError(
            f"the family {family} takes no `last_image`",
            f"these families take one: {', '.join(LAST_IMAGE_FAMILIES)}",
            details={"family": family, "known": list(LAST_IMAGE_FAMILIES)},
        )


#: Names of the families whose clips may have references besides their input image.
REFERENCE_FAMILIES = tuple(name for name, spec in FAMILY_SPECS.items() if spec.max_references)


def check_references(family: str, count: int) -> None:
    """Raise a `RequestError` unless a family's clips may have `count` references besides the image.

    Args:
        family: Name of the family.
        count: Number of references of each clip.

    Raises:
        RequestError: The family takes no references, or fewer than `count`.
    """
    highest = FAMILY_SPECS[family].max_references
    if count and not highest:
        raise RequestError(
            f"the family {family} takes no `references`",
            f"these families take references: {', '.join(REFERENCE_FAMILIES)}",
            details={"family": family, "known": list(REFERENCE_FAMILIES)},
        )
    require(
        count <= highest,
        f"clips of the family {family} have at most {highest} `references` besides their image, "
        f"got {count}",
        family=family,
        count=count,
        highest=highest,
    )


#: Sampling parameters with their own command-line option, such as `--steps`, by field name. Users
#: set all other parameters by `--param`.
OPTION_PARAMS = {**params_of(PromptedSampling), **params_of(svd.SvdSampling)}


def sampling_from(values: Mapping[str, Any]) -> SamplingConfig:
    """Create the sampling parameters of the family that `values` names, with the given values.

    Args:
        values: Values by field name. Without the field `family`, the family is SVD.

    Raises:
        RequestError: A field name is unknown, or a value is out of range.
    """
    family = values.get("family", "svd")
    check_choice("family", family, (*SAMPLING_CLASSES,))
    kind = SAMPLING_CLASSES[family]
    known = {field.name for field in fields(kind)}
    unknown = ", ".join(sorted(values.keys() - known))
    require(not unknown, f"{family} has no parameter {shown(unknown)}")
    sampling: SamplingConfig = kind(**values)
    return sampling
