"""The options of a draft, in which all ranks work on one clip to show it sooner."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from svdpp.cli.options.declare import DRAFT, flag, option
from svdpp.config import DraftConfig
from svdpp.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Whether all ranks draft one clip at a time, and from which steps."""

    draft: Annotated[
        bool,
        flag(
            "--draft",
            panel=DRAFT,
            help="All ranks work on one clip at a time: an approximation is ready after about half "
            "the steps, the exact clip at the usual time.",
        ),
    ] = False
    draft_starts: Annotated[
        str | None,
        option(
            "--draft-starts",
            panel=DRAFT,
            metavar="LIST|FILE",
            help="Start step of each rank in a draft, rising from 0, such as 0,8,12,17; or a file "
            "that svdpp profile --draft wrote.",
            default="as measured on the demo model, for 2 to 8 ranks",
        ),
    ] = None
    draft_psnr: Annotated[
        str | None,
        option(
            "--draft-psnr",
            panel=DRAFT,
            metavar="PSNR",
            help="End a clip as soon as two successive ranks agree to this PSNR, such as 60dB. The "
            "clip stays approximate, and its JSON says so.",
            default="continue to the exact clip",
        ),
    ] = None

    def __post_init__(self) -> None:
        for name in ("draft_starts", "draft_psnr"):
            if getattr(self, name) is not None and not self.draft:
                raise RequestError(f"--{name.replace('_', '-')} needs --draft", "add --draft")

    def refuse_beside(self, given: Mapping[str, Any]) -> None:
        """Refuses options that have no effect on a draft."""
        for name, value in given.items():
            if self.draft and value:
                raise RequestError(
                    f"--{name} has no effect with --draft, where all ranks denoise the same clip",
                    f"leave out --{name}, or --draft",
                )

    def world(self, num_steps: int) -> int | None:
        """The number of ranks that the start steps name; None if they are not given."""
        if self.draft_starts is None:
            return None
        from svdpp.plan.draft_starts import parse_start_steps

        return len(parse_start_steps(self.draft_starts, num_steps, None))

    def settings(self, num_steps: int, world_size: int) -> dict[str, Any]:
        """The fields of a `PipelineConfig`; empty without `--draft`."""
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
        if not self.draft or self.draft_starts is not None:
            return ""
        from svdpp.plan.draft_starts import measured_steps

        measured = measured_steps(num_steps)
        if measured == num_steps:
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
