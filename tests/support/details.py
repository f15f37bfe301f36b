"""Check that an error's `details` contain all numbers of its sentence (charter, row 23)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from svdpp.errors import SvdppError

# Number in a sentence, possibly with a unit, or as a part of a size such as 64x48. Digits in names,
# paths or options do not match.
_NUMBER = re.compile(r"(?<![\w./:@#-])-?\d[\d,]*(?:\.\d+)?(?=x\d|[^\w./:-]|[.,:;)]?(?:\s|$)|$)")
# Text whose numbers are ignored: quoted names and user input, paths, options, and the version in
# the name of a model.
_QUOTED = re.compile(r"Wan 2\.\d|'[^']*'|\"[^\"]*\"|`[^`]*`|\S*/\S*|--?\S+")


def numbers_not_in_details(error: SvdppError) -> list[str]:
    """Return the numbers of an error's sentence that are not among the values of its `details`."""
    shown = {text for value in _flatten(error.details) for text in _texts(value)}
    sentence = _QUOTED.sub(" ", error.message)
    numbers = (found[0].rstrip(",").replace(",", "") for found in _NUMBER.finditer(sentence))
    return [each for each in numbers if each not in shown and each.lstrip("-") not in shown]


def _flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _flatten(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _flatten(each)
    else:
        yield value


def _texts(value: Any) -> Iterator[str]:
    """Yield the ways to write a value of `details` in a sentence, such as rounded or in GiB."""
    if isinstance(value, str):
        yield from re.findall(r"-?\d+(?:\.\d+)?", value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    yield str(value)
    for unit in (1, 2**30, 2**20, 2**10, 10**9, 10**6, 0.01):
        for digits in range(4):
            yield f"{value / unit:.{digits}f}"
            yield f"{abs(value) / unit:.{digits}f}"
