"""Owns what commands make of the options of a draft."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from svdpp.config import DraftConfig
from svdpp.errors import RequestError
from svdpp.plan.draft_starts import default_starts, parse_starts


@dataclass(frozen=True, kw_only=True)
class DraftChoice:
    """What the options say of a draft.

    Args:
        draft: whether one is asked for.
        starts: as it was given; None where nothing was.
        accept: as it was given.

    Raises:
        RequestError: the others say something where no draft is asked for.
    """

    draft: bool
    starts: str | None = None
    accept: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("starts", self.starts), ("accept", self.accept)):
            if value is not None and not self.draft:
                raise RequestError(f"--{name} is about a draft", "add --draft")

    def refuse_beside(self, given: Mapping[str, Any]) -> None:
        """Refuses options that a draft leaves no room for.

        Args:
            given: by name, as on the command line; None, False and empty are not given.

        Raises:
            RequestError: naming the first of them.
        """
        for name, value in given.items():
            if self.draft and value:
                raise RequestError(
                    f"--draft has all ranks walk the same clip: leave out --{name}",
                    f"or leave out --draft, for which --{name} means nothing",
                )

    def world(self, num_steps: int) -> int | None:
        """The number of ranks that the starts name; None where they do not."""
        if self.starts is None:
            return None
        return len(parse_starts(self.starts, num_steps, None))

    def settings(self, num_steps: int, world_size: int) -> dict[str, Any]:
        """The fields of a `PipelineConfig`; empty where no draft is asked for.

        Raises:
            RequestError: no starts are known for these counts, or the agreement is none.
        """
        if not self.draft:
            return {}
        if self.starts is None:
            starts = default_starts(num_steps, world_size)
        else:
            starts = parse_starts(self.starts, num_steps, world_size)
        return {"draft": DraftConfig(starts=starts, accept_db=_decibel(self.accept))}


def _decibel(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,4}(?:\.\d{1,6})?)\s*(?:dB)?", text, re.ASCII | re.IGNORECASE)
    if match is None:
        raise RequestError(f"--accept must be a PSNR in dB, got {text!r}", "such as --accept 60dB")
    return float(match[1])
