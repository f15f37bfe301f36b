"""The Action: one thing that one rank does for one clip, with its text form and parser."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kinds of action."""

    ENCODE = "ENCODE"
    """Read the clip's image, encode it and draw its noise: gives the latent before step 0."""
    LOAD = "LOAD"
    """Read the latent checkpoint that an earlier run wrote after `start` steps."""
    RECV = "RECV"
    """Post the receive of the clip's packet; the action that uses the latent waits for it."""
    DENOISE = "DENOISE"
    """Run steps `start` to `end` (exclusive) of the clip."""
    SHARE = "SHARE"
    """Send the clip's packet to `peer`, the other rank of the pair, and go on with it."""
    SEND = "SEND"
    """Send the clip's packet to `peer` in the background."""
    DROP = "DROP"
    """Forget the clip: the other rank of the pair has the same latent and finishes it."""
    DECODE = "DECODE"
    """Turn the final latent, or the part of it that `frames` names, into frames."""
    RETURN = "RETURN"
    """Send the decoded frames to `peer`, which finishes the clip, and forget the clip."""
    GATHER = "GATHER"
    """Wait for the frames that `peer` decodes."""
    FINISH = "FINISH"
    """Hash the result, write it in the background, and report the clip as finished."""


class FrameRange(NamedTuple):
    """The frames `first` to `end` (exclusive) of the `total` of a clip."""

    first: int
    end: int
    total: int

    @property
    def fraction(self) -> float:
        """Of all frames."""
        return (self.end - self.first) / self.total


class Action(NamedTuple):
    """One entry of a rank's list.

    Args:
        clip: index of the clip, counted from the first one given to the pipeline.
        start: steps of the clip that are done when the action starts.
        end: steps done when the action ends; equals `start` except for DENOISE.
        peer: the other rank of a transfer; of a DENOISE, the other rank of the pair, which does the
            same steps; -1 for other actions.
        frames: those that the action decodes or transfers, or for which it transfers the latent, if
            several ranks decode the clip; else None.
    """

    kind: Kind
    clip: int
    start: int
    end: int
    peer: int = -1
    frames: FrameRange | None = None

    def __str__(self) -> str:
        has_range = self.kind is Kind.DENOISE
        place = f"{self.start}:{self.end}" if has_range else f"@{self.start}"
        arrow = f" {_ARROWS[self.kind]}{self.peer}" if self.peer >= 0 else ""
        frames = " {}:{}/{}".format(*self.frames) if self.frames else ""
        return f"{self.kind} c{self.clip} {place}{arrow}{frames}"

    @staticmethod
    def at(
        kind: Kind, clip: int, step: int, peer: int = -1, frames: FrameRange | None = None
    ) -> Action:
        """An action of `clip` with `step` steps done, which does none itself."""
        return Action(kind, clip, step, step, peer, frames)

    @staticmethod
    def parse(text: str) -> Action:
        """Parse the output of `str()`."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"not an action: {text!r}")
        kind, clip, start, end, peer, *frames = match.groups()
        return Action(
            Kind(kind),
            int(clip),
            int(start),
            int(end or start),
            int(peer or -1),
            FrameRange(*map(int, frames)) if frames[0] else None,
        )

    @property
    def is_compute(self) -> bool:
        """Whether the action keeps the rank's device busy."""
        return self.kind in (Kind.ENCODE, Kind.DENOISE, Kind.DECODE)

    @property
    def fraction(self) -> float:
        """Of a decode: the part of the clip's frames that it makes."""
        return 1.0 if self.frames is None else self.frames.fraction

    @property
    def helps(self) -> bool:
        """Whether it decodes for another rank, which finishes the clip."""
        return self.kind is Kind.DECODE and self.frames is not None and self.frames.first > 0


#: Actions that send a packet.
SENDS = (Kind.SEND, Kind.SHARE, Kind.RETURN)

_ARROWS = {Kind.RECV: "<", Kind.GATHER: "<", **dict.fromkeys(SENDS, ">"), Kind.DENOISE: "="}
_ACTION = re.compile(
    rf"({'|'.join(Kind)}) c(\d+) @?(\d+)(?::(\d+))?(?: [<>=](\d+))?(?: (\d+):(\d+)/(\d+))?"
)
