"""Owns the options of a draft: all ranks work on one clip, which is there sooner."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from svdpp.cli.options.declare import DRAFT, flag, option
from svdpp.config import DraftConfig
from svdpp.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Whether all ranks draft one clip at a time, and what they start from.

    Raises:
        RequestError: the other options say something where no draft is asked for.
    """

    draft: Annotated[
        bool,
        flag(
            "--draft",
            panel=DRAFT,
            help="All ranks work on one clip at a time: an approximation is there after about half "
            "the steps, the exact clip at the usual time.",
        ),
    ] = False
    draft_starts: Annotated[
        str | None,
        option(
            "--draft-starts",
            panel=DRAFT,
            metavar="LIST|FILE",
            help="The step at which each rank of a draft starts, rising from 0, such as 0,8,12,17; "
            "or a file of svdpp profile --draft.",
            default="as measured on the demo model, for 2 to 8 ranks",
        ),
    ] = None
    draft_psnr: Annotated[
        str | None,
        option(
            "--draft-psnr",
            panel=DRAFT,
            metavar="PSNR",
            help="End a clip as soon as two successive ranks agree to this, such as 60dB. The clip "
            "stays approximate, and its JSON says so.",
            default="go on to the exact clip",
        ),
    ] = None

    def __post_init__(self) -> None:
        for name in ("draft_starts", "draft_psnr"):
            if getattr(self, name) is not None and not self.draft:
                raise RequestError(f"--{name.replace('_', '-')} is about a draft", "add --draft")

    def refuse_beside(self, given: Mapping[str, Any]) -> None:
        """Refuses options that have no effect on a draft.

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
        if self.draft_starts is None:
            return None
        from svdpp.plan.draft_starts import parse_start_steps

        return len(parse_start_steps(self.draft_starts, num_steps, None))

    def settings(self, num_steps: int, world_size: int) -> dict[str, Any]:
        """The fields of a `PipelineConfig`; empty where no draft is asked for.

        Raises:
            RequestError: no starts are known for these counts, or the agreement is none.
        """
        if not self.draft:
            return {}
        from svdpp.plan.draft_starts import default_start_steps, parse_start_steps

        if self.draft_starts is None:
            start_steps = default_start_steps(num_steps, world_size)
        else:
            start_steps = parse_start_steps(self.draft_starts, num_steps, world_size)
        psnr = _decibel(self.draft_psnr)
        return {"draft": DraftConfig(start_steps=start_steps, accept_psnr_db=psnr)}

    def remark(self, num_steps: int) -> str:
        """A sentence on default start steps that were not measured; "" for none."""
        from svdpp.plan.draft_starts import measured_steps

        measured = measured_steps(num_steps)
        if not self.draft or self.draft_starts is not None or measured == num_steps:
            return ""
        return (
            f"start steps: scaled from those measured for {measured} steps; svdpp profile --draft "
            f"--steps {num_steps} measures them"
        )


def _decibel(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,4}(?:\.\d{1,6})?)\s*(?:dB)?", text, re.ASCII | re.IGNORECASE)
    if match is None:
        raise RequestError(
            f"--draft-psnr must be a PSNR in dB, got {text!r}", "such as --draft-psnr 60dB"
        )
    return float(match[1])
