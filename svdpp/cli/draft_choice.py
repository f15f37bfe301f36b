"""Owns what commands make of the options of a draft."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from svdpp.config import DraftConfig
from svdpp.errors import RequestError
from svdpp.plan.draft_starts import default_start_steps, parse_start_steps


@dataclass(frozen=True, kw_only=True)
class DraftChoice:
    """What the options say of a draft.

    Args:
        draft: whether one is asked for.
        start_steps: `--draft-starts` as given; None if it was not.
        psnr: `--draft-psnr` as given; None if it was not.

    Raises:
        RequestError: the others say something where no draft is asked for.
    """

    draft: bool
    start_steps: str | None = None
    psnr: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("draft-starts", self.start_steps), ("draft-psnr", self.psnr)):
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
                    f"--draft has all ranks denoise the same clip: leave out --{name}",
                    f"or leave out --draft, for which --{name} means nothing",
                )

    def world(self, num_steps: int) -> int | None:
        """The number of ranks that the starts name; None where they do not."""
        if self.start_steps is None:
            return None
        return len(parse_start_steps(self.start_steps, num_steps, None))

    def settings(self, num_steps: int, world_size: int) -> dict[str, Any]:
        """The fields of a `PipelineConfig`; empty where no draft is asked for.

        Raises:
            RequestError: no starts are known for these counts, or the agreement is none.
        """
        if not self.draft:
            return {}
        if self.start_steps is None:
            start_steps = default_start_steps(num_steps, world_size)
        else:
            start_steps = parse_start_steps(self.start_steps, num_steps, world_size)
        return {"draft": DraftConfig(start_steps=start_steps, accept_psnr_db=_decibel(self.psnr))}


def _decibel(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,4}(?:\.\d{1,6})?)\s*(?:dB)?", text, re.ASCII | re.IGNORECASE)
    if match is None:
        raise RequestError(
            f"--draft-psnr must be a PSNR in dB, got {text!r}", "such as --draft-psnr 60dB"
        )
    return float(match[1])
