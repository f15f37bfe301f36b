"""Requested LoRAs: their fields, and parsing from the command line, jobs files and HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from svdpp.config.added_files import AddedFile
from svdpp.config.limits import (
    MAX_LORA_WEIGHT,
    MAX_LORAS,
    detail_value,
    is_number,
    require,
    shown,
)
from svdpp.errors import RequestError, nearest


@dataclass(frozen=True, kw_only=True)
class Lora(AddedFile):
    """Requested LoRA: its file, and the weight that scales the LoRA's change of the denoiser."""

    config_field, noun, suffix = "loras", "LoRA", ".safetensors"

    weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            is_number(self.weight) and abs(self.weight) <= MAX_LORA_WEIGHT,
            f"the weight of `loras` must be -{MAX_LORA_WEIGHT:g} to {MAX_LORA_WEIGHT:g}, got "
            f"{shown(self.weight)}",
            lora=self.name,
            weight=detail_value(self.weight),
            lowest=-MAX_LORA_WEIGHT,
            highest=MAX_LORA_WEIGHT,
        )

    @property
    def source(self) -> Lora:
        """Copy of this LoRA with weight 1; equal for LoRAs that differ only in the weight."""
        return replace(self, weight=1.0)


_LORA = re.compile(
    r"(?P<name>.+?)(:(?P<weight>[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?))?(:(?P<expert>high|low))?"
)
_EXPERTS = ("high", "low")
#: Keys of a LoRA as a JSON object; `weight` is a synonym of `scale`.
_FIELDS = ("name", "scale", "weight", "expert")


def parse_loras(value: object) -> tuple[Lora, ...]:
    """Parse the LoRAs that a user requests, given as a text, an object or a list.

    Args:
        value: LoRAs as one of: a text `FILE[:WEIGHT][:high|:low]`; an object with the key `name`,
            and optionally `scale` (or `weight`, default 1) and `expert`; a list of such texts and
            objects; JSON text of an object or a list; or None for no LoRAs.

    Raises:
        RequestError: The value has another form, has too many LoRAs, or a weight is out of range.
    """
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            wrong = f"`loras` {shown(value)} is not JSON"
            raise RequestError(wrong, details={"value": shown(value)}) from error
    if value is None:
        return ()
    listed = value if isinstance(value, list | tuple) else [value]
    require(
        len(listed) <= MAX_LORAS,
        f"`loras` can have at most {MAX_LORAS} LoRAs, got {len(listed)}",
        count=len(listed),
        highest=MAX_LORAS,
    )
    return tuple(map(_parse_lora, listed))


def _parse_lora(value: object) -> Lora:
    if isinstance(value, str):
        return _parse_text(value)
    form = "write FILE:0.8, or write an object with name and scale"
    if not isinstance(value, dict):
        details = {"value": detail_value(value)}
        raise RequestError(f"`loras` {shown(value)} is not a LoRA", form, details=details)
    for name in value:
        if name not in _FIELDS:
            hint = nearest(str(name), _FIELDS, f"the fields are {', '.join(_FIELDS)}")
            wrong = f"`loras` has no field {shown(name)}"
            raise RequestError(wrong, hint, details={"name": shown(name), "known": list(_FIELDS)})
    require("name" in value, "a LoRA of `loras` has no name", form)
    both = "a LoRA has both scale and weight, which mean the same"
    require(not ("scale" in value and "weight" in value), both, "leave one of them out")
    expert = value.get("expert")
    wrong = f"the expert of `loras` must be high or low, got {shown(expert)}"
    require(expert in (None, *_EXPERTS), wrong, known=list(_EXPERTS))
    weight: Any = value.get("scale", value.get("weight", 1.0))
    return Lora(name=value["name"], weight=weight, expert=expert)


def _parse_text(text: str) -> Lora:
    match = _LORA.fullmatch(text)
    if match is None:
        wrong = f"`loras` {shown(text)} is not FILE[:WEIGHT][:high|:low]"
        raise RequestError(wrong, details={"value": shown(text)})
    expert: Any = match["expert"]
    return Lora(name=match["name"], weight=float(match["weight"] or 1), expert=expert)


def ordered_by_loras(loras: Iterable[tuple[Lora, ...]]) -> list[int]:
    """Return the indices of clips, ordered so that clips with equal LoRAs follow each other.

    In this order, ranks load each set of LoRAs only once. The sets are in the order of their first
    clips. Clips with the same set keep their order.

    Args:
        loras: LoRAs of each clip.
    """
    places: dict[tuple[Lora, ...], list[int]] = {}
    for index, each in enumerate(loras):
        places.setdefault(each, []).append(index)
    return [index for indices in places.values() for index in indices]
