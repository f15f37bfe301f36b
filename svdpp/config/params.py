"""What is said of a parameter once: its type, range, help and names.

A field of a sampling class is annotated with it (`config.sampling`, `config.families`). The checks,
the options of the command line, the fields of requests and `svdpp models` follow from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Any, get_args, get_type_hints

from svdpp.config.limits import check_number, check_whole, require


@dataclass(frozen=True)
class Param:
    """A number that samplers take. `params_of` fills in what the annotated field says itself."""

    default: Any
    """Of its family; None: that of the model, or of another parameter."""
    highest: float
    help: str
    lowest: float = 0
    name: str = ""
    """Of the field."""
    is_shared: bool = False
    """Whether it has an option of its own, `option`."""
    api: str = ""
    """Its name in HTTP requests and benches, if it is another one."""
    unit: str = ""
    above: bool = False
    """Whether it must be above `lowest`."""
    shown_default: str = ""
    """The default in words, for the help."""
    kind: type[int] | type[float] = float
    is_optional: bool = False
    """Whether None is a value of it."""

    @property
    def option(self) -> str:
        """The option as users type it."""
        name = self.field.replace("_", "-")
        return f"--{name}" if self.is_shared else f"--param {self.name}"

    @property
    def field(self) -> str:
        """Its name in HTTP requests and benches."""
        return self.api or self.name

    def check(self, value: Any) -> None:
        """Refuses a value of another type or out of range, by the option's name."""
        if value is None and self.is_optional:
            return
        if self.kind is int:
            unit = f" {self.unit}" if self.unit else ""
            check_whole(self.option, value, int(self.lowest), int(self.highest), unit)
            return
        check_number(self.option, value, self.highest)
        is_low = self.above and value <= self.lowest
        require(not is_low, f"{self.option} must be above {self.lowest:g}, got {value}")


def within(low: float, high: float, help: str, **more: Any) -> Param:
    """The annotation of a field, which has the type and the default."""
    return Param(None, high, help, low, **more)


def shared(low: float, high: float, help: str, api: str = "", **more: Any) -> Param:
    """The same for a parameter with an option of its own, named as in requests."""
    return within(low, high, help, api=api, is_shared=True, **more)


@cache
def params_of(kind: Any) -> dict[str, Param]:
    """The parameters of a sampling class that have a `Param`, by the name of the field."""
    hints, found = get_type_hints(kind, include_extras=True), {}
    for each in fields(kind):
        parts = list(_parts(hints[each.name]))
        for param in (part for part in parts if isinstance(part, Param)):
            found[each.name] = replace(
                param,
                name=each.name,
                default=None if each.default is MISSING else each.default,
                kind=int if int in parts else float,
                is_optional=type(None) in parts,
            )
    return found


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for part in get_args(hint):
        yield from _parts(part)
